"""What ``fedloom --help`` and ``fedloom COMMAND --help`` print, and where each command lives; imports nothing."""

HELP = """FedLoom: federated learning when clients differ.

usage: fedloom COMMAND …

  run         train a federated method; leaves a run directory with curves, tables and checkpoints
  distill     train a small model, the student, with a larger one as its teacher
  online      learn from a stream of tasks with bounded memory
  synthesize  train a method that makes labelled synthetic data, and evaluate the data
  list        everything there is to choose from: methods, parts, data, partitions, models, …, and all settings
  data        which data sets are on this machine, and what is in them
  partition   show who holds which data, before anything trains
  report      one page that compares any number of runs

start here:
  fedloom run                                    FedAvg against FedDyn on real digits, in seconds
  fedloom run method=scaffold rounds=100         one method; any setting is key=value, in any order
  fedloom list settings                          every key with its default
  fedloom COMMAND --help                         more on each command

  fedloom --version
"""

PLACES = """  checkpoint.every=10     rounds between checkpoints; trackers=[tensorboard,mlflow] get every record too
  out=DIR                 the run directory; by default runs/<date>/<time>-<method>-<seed>
  resume=DIR              continue a run or a sweep where it stopped; gives the same bits

options:
  -m, --multirun          run every combination of keys with several values: method=fedavg,feddyn seed=range(1,4)
  -q, --quiet             no progress, only the results
  --dry-run               check everything, print the resolved configuration, which is a recipe, and stop
  --debug                 a traceback for errors that are otherwise one sentence
"""

RUN = f"""Train a federated method.

usage: fedloom run [RECIPE.yaml] [key=value …] [-m] [-q] [--dry-run] [--debug]

Without a method, FedAvg and FedDyn are compared. Keys (all of them: fedloom list settings):

  method=feddyn           by name, with its settings as method.alpha=0.1; each part of it can be replaced:
                          method.mixing=uniform, method.drift=scaffold, method.server=adam,
                          method.objective=[cross_entropy,proximal]
  data=mnist              by name; likewise partition=, model=, engine=, …, each with settings (partition.alpha=0.1)
  clients=100 participation=0.1 rounds=200 seed=1
  local.epochs=5 local.lr=0.1 local.batch_size=50
  evaluation.what=[global,clients,average] evaluation.target=0.9
{PLACES}
examples:
  fedloom run method=feddyn clients=100 participation=0.1 rounds=100 engine=processes
  fedloom run -m method=fedavg,feddyn,scaffold seed=1,2,3
  fedloom run method=fedavg method.drift=scaffold method.server=adam method.server.lr=0.05
  fedloom run recipe.yaml method.alpha=0.03
  fedloom run resume=runs/2026-01-31/093000-feddyn-0 rounds=200
"""

SYNTHESIZE = f"""Train a method that makes labelled synthetic data, and evaluate the data.

usage: fedloom synthesize [RECIPE.yaml] [key=value …] [-m] [-q] [--dry-run] [--debug]

Takes the keys of fedloom run, and those of the judge, which evaluates the synthetic set. Methods: fedevg (the default;
no model is ever sent), fedcgan and fedcvae (both networks are sent, as in FedAvg). The run directory also gets
synthetic.npz and synthetic.parquet (images, labels and their origin), synthetic.json (everything the judge measured)
and pictures; either file is data for another run: data=generated data.path=DIR/synthetic.npz.

  judge.every=50          rounds between two evaluations, each a picture and numbers; 0 evaluates at the end alone
  judge.per_class=10      samples of each class drawn from a generator; FedEvg's own number is method.per_class
  judge.classifier=auto   the network that learns from the set, and the one trained on real data for comparison
  judge.max_steps=2000    the most steps for which either is trained; also judge.lr, .batch_size, .loss_tol, .augment
{PLACES}
examples:
  fedloom synthesize
  fedloom synthesize -m method=fedevg,fedcgan,fedcvae rounds=200 judge.every=50
"""

ONLINE = f"""Learn from a stream of tasks: each is predicted before it is learned.

usage: fedloom online [RECIPE.yaml] [key=value …] [-m] [-q] [--dry-run] [--debug]

Without a learner, moml, ftml and mogd are compared. Keys (all of them: fedloom list settings):

  learner=moml            moml, b_moml, moml_nabla0, ftml, mogd, toe, fs; with settings: learner.alpha=5
  adaptation=maml         how the model adapts to a task: adaptation.lr=0.1 adaptation.steps=5; or proto
  data=mnist stream=s_mnist tasks=1000     tasks: s_mnist or k_way, with settings (stream.ways=3)
  model=mlp model.hidden=[200]
  local.steps=10 local.lr=0.1 local.batch_size=10 local.weight_decay=1e-3 local.clip=3
  measures.ltm_every=50 measures.efficiency_every=10       when all tasks so far are evaluated, and with fewer samples
  learner.alpha=[1,5,10]  a list is a grid of experts, which Hedge combines: hedge.gamma=0.1
  seed=1 support=10 dtype=float32 device=auto
{PLACES}
A continued run may have more tasks: resume=DIR tasks=2000.

examples:
  fedloom online
  fedloom online learner=moml model.hidden=[200] tasks=1000 adaptation.lr=[0.1,0.01] learner.alpha=[1,5,10]
  fedloom online -m learner=moml,ftml stream=k_way adaptation=proto seed=1,2
"""

DISTILL = f"""Train a small model, the student, with a larger one as its teacher.

usage: fedloom distill [RECIPE.yaml] [key=value …] [-m] [-q] [--dry-run] [--debug]

Without a method, cross entropy (ce), distillation (kd) and selective distillation (disk) are compared. Keys (all of
them: fedloom list settings):

  method=disk             ce, kd, disk, fitnet, semckd, simkd, simkd_disk; settings as method.alpha=0.1
  data=fashion_mnist      by name, centralised; samples=10000 uses so many, validation=0.1 of them to choose a model
  model=fedssa_cnn        the student, with its settings: model.channels=[2,4]
  teacher=two_cnn         a model, trained first (teacher_epochs=20, teacher_training.lr=0.05), or a run directory
  epochs=40               the student's passes over the data, equal for every method (budget=passes), warm start
                          included; under budget=published the method's rounds, in which DiSK makes three passes
  warmup_epochs=10        passes of the warm start; start=DIR takes a student that a run of ce has trained instead
  training.lr=0.05 training.batch_size=50 augment=[crop,flip] cache=auto seed=1 device=auto
{PLACES}
examples:
  fedloom distill                                         three methods on real digits, in seconds
  fedloom distill method=disk data=fashion_mnist teacher=two_cnn model=fedssa_cnn model.channels=[2,4]
  fedloom distill -m method=simkd,simkd_disk teacher=runs/2026-01-31/093000-fedavg-0 data=mnist model=mlp
"""

LIST = """Everything there is to choose from.

usage: fedloom list KIND [NAME]

  fedloom list methods      method=          named compositions of parts
  fedloom list parts        method.<slot>=   what methods are made of; each can replace another in its slot
  fedloom list data         data=            where samples come from
  fedloom list partitions   partition=       who holds which samples
  fedloom list noises       noise=           wrong training labels
  fedloom list targets      target=          label distributions for which a model is wanted
  fedloom list models       model=           networks
  fedloom list engines      engine=          where the clients' work runs
  fedloom list computes     compute=         how clients are stepped
  fedloom list learners     learner=         fedloom online: methods that learn from a stream of tasks
  fedloom list streams      stream=          fedloom online: streams of tasks
  fedloom list distillers   method=          fedloom distill: methods of distillation
  fedloom list settings                      every key of every command, with its default and meaning

With a name, everything about it: fedloom list methods feddyn, or only: fedloom list feddyn.
"""

DATA = """Which data sets are on this machine, and what is in them.

usage: fedloom data
       fedloom data NAME [key=value …] [--out FILE] [--debug]

Without a name: what is here, how large it is, and where the rest would be looked for. With one: shapes, classes and
clients (the natural ones, if there are any). Takes the keys of fedloom run; those that matter are data.…, partition,
clients and seed.

options:
  --out FILE              pictures (png, svg or pdf): samples of each class; beside it FILE-clients, labels by client

example:
  fedloom data digits partition=dirichlet partition.alpha=0.1 clients=20 --out digits.png
"""

PARTITION = """Show who holds which data, before anything trains.

usage: fedloom partition [RECIPE.yaml] [key=value …] [--out FILE] [--debug]

Takes the keys of fedloom run; those that matter are data, partition, clients, seed, validation and held_out.

options:
  --out FILE              the picture (png, svg or pdf); by default partition.png

example:
  fedloom partition data=digits partition=pathological partition.classes=2 clients=10
"""

REPORT = """One page that compares runs, with figures and tables.

usage: fedloom report DIR… [--out DIR] [--debug]

A DIR is a run directory, or a folder that holds some. The page goes into --out: by default into DIR if there is one
alone, otherwise into report/.
"""

TRAINS = ("-m --multirun", "-q --quiet", "--dry-run")

COMMANDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "run": (RUN, "run", TRAINS),
    "distill": (DISTILL, "distill", TRAINS),
    "online": (ONLINE, "online", TRAINS),
    "synthesize": (SYNTHESIZE, "synthesize", TRAINS),
    "list": (LIST, "listing", ()),
    "data": (DATA, "data", ("--out",)),
    "partition": (PARTITION, "partition", ("--out",)),
    "report": (REPORT, "report", ("--out",)),
}
"""Every command's help, module and options."""
