"""The applications of this distribution: their light records and the texts of their help; imports none of them."""

from __future__ import annotations

from fedloom.applications import PLACES, TRAINS, Application, Listed

SEARCH = f"""Find the composition of parts that suits these clients: which method, with which parts and settings.

usage: fedloom search [RECIPE.yaml …] [key=value …] [-m] [-q] [--json] [--log FILE] [--dry-run] [--debug]

Candidates start from the named methods; later ones replace a part of one and change its settings, as a tree-structured
Parzen estimator (Optuna) proposes, and end early if they fall behind. They are compared on validation samples. The
best ones, FedAvg, and the best one without each of its parts are then trained on held-out seeds and tested on test
samples. Takes the keys of fedloom run, and keys that begin with search (for all of them: fedloom list settings):

  search.budget=1000      total for all candidates, in search.unit: rounds, bytes or minutes
  search.goal=clients/accuracy/worst10    what to maximise or minimise: any metric of the records
  search.equal=bytes      candidates that communicate more than FedAvg get fewer rounds
  search.methods=[fedavg,feddyn,ditto]    the named methods to start from, instead of all that fit
  search.also=[local.lr,local.weight_decay]   further keys to search, in a range around their values
  search.finalists=3 search.seeds=3       the final comparison
  method.uplink=[clip_noise]              a part that every candidate has

The run directory contains candidates.csv, ranking.csv, winner.yaml (a recipe for fedloom run), figures/pareto.svg,
study.db (for Optuna's dashboard) and the runs of the final comparison, for fedloom report. Needs the extra search:
pip install "fedloom[search]".
{PLACES}
examples:
  fedloom search data=fashion_mnist partition=dirichlet partition.alpha=0.1 clients=100 participation=0.1
  fedloom search rounds=30 search.budget=600 search.goal=clients/accuracy/worst10
"""

ONLINE = f"""Learn from a stream of tasks, each of which is predicted before it is learned.

usage: fedloom online [RECIPE.yaml …] [key=value …] [-m] [-q] [--json] [--log FILE] [--dry-run] [--debug]

Without a learner, moml, ftml and mogd are compared. Keys (for all of them: fedloom list settings):

  learner=moml            moml, b_moml, moml_nabla0, ftml, mogd, toe, toe_continued, fs; settings: learner.alpha=5
  adaptation=maml         adaptation of the model to a task: adaptation.lr=0.1 adaptation.steps=5; or proto
  data=mnist stream=s_mnist tasks=1000     streams: s_mnist, transformed, k_way, with settings (stream.ways=3); natural,
                          one task per writer, role or user; in_order, as the rows of data=table:FILE data.time=COLUMN
  model=mlp model.hidden=[200]
  local.steps=10 local.lr=0.1 local.batch_size=10 local.weight_decay=1e-3 local.clip=3
  measures.ltm_every=50   tasks between evaluations on all tasks so far; measures.efficiency_every=10 likewise with
                          fewer samples
  learner.alpha=[1,5,10]  a list is a grid of experts, combined by Hedge: hedge.gamma=0.1
  seed=1 support=10 dtype=float32 device=auto
{PLACES}
A resumed run may have more tasks: resume=DIR tasks=2000.

examples:
  fedloom online
  fedloom online learner=moml model.hidden=[200] tasks=1000 adaptation.lr=[0.1,0.01] learner.alpha=[1,5,10]
  fedloom online -m learner=moml,ftml stream=k_way adaptation=proto seed=1,2
  fedloom online data=mnist stream=natural stream.train=60 stream.test=20
"""

DISTILL = f"""Train a small model, the student, with a larger one as its teacher.

usage: fedloom distill [RECIPE.yaml …] [key=value …] [-m] [-q] [--json] [--log FILE] [--dry-run] [--debug]

Without a method, cross entropy (ce), distillation (kd) and selective distillation (disk) are compared. Keys (for
all of them: fedloom list settings):

  method=disk             ce, kd, disk, fitnet, semckd, simkd, simkd_disk; settings as method.alpha=0.1
  data=fashion_mnist      a name; samples=10000 uses a subset, and validation=0.1 sets a fraction aside for selection
  model=fedssa_cnn        the student, with settings like model.channels=[2,4]
  teacher=two_cnn         a model to train first (teacher_epochs=20, teacher_training.lr=0.05), or a run directory
  teacher=timm            any network of timm, as with model=timm: teacher.network=resnet18 teacher.weights=FILE
                          teacher.head=true keeps its classifier, and teacher_epochs=0 trains nothing
  epochs=40               the student's passes over the data, equal for all methods, warm start included; with
                          budget=published the method's rounds, each of which is three passes for DiSK
  warmup_epochs=10        passes of the warm start; start=DIR uses the student of a run of ce instead
  training.lr=0.05 training.batch_size=50 augment=[crop,flip] cache=auto seed=1 device=auto
{PLACES}
examples:
  fedloom distill                                         three methods on real digits, in a minute
  fedloom distill method=disk data=fashion_mnist teacher=two_cnn model=fedssa_cnn model.channels=[2,4]
  fedloom distill -m method=simkd,simkd_disk teacher=runs/2026-01-31/093000-fedavg-0 data=mnist model=mlp
"""

SYNTHESIZE = f"""Train a method that makes labelled synthetic data, and evaluate the data.

usage: fedloom synthesize [RECIPE.yaml …] [key=value …] [-m] [-q] [--json] [--log FILE] [--dry-run] [--debug]

Takes the keys of fedloom run, and keys that begin with judge, for the evaluation of the synthetic set. Methods: fedevg
(the default; no model is sent), fedcgan and fedcvae (both networks are sent, as in FedAvg). The run directory also has
synthetic.npz and synthetic.parquet (images, labels and provenance), synthetic.json (the evaluation) and figures; either
file can be the data of another run: data=generated data.path=DIR/synthetic.npz.

  judge.every=50          rounds between evaluations, each with a figure and numbers; 0 evaluates at the end only
  judge.per_class=10      samples of each class drawn from a generator; FedEvg's own number is method.per_class
  judge.classifier=auto   the network trained on the set, and the one trained on real data for comparison
  judge.max_steps=2000    maximum number of training steps of either; also judge.lr, .batch_size, .loss_tol, .augment
{PLACES}
examples:
  fedloom synthesize
  fedloom synthesize -m method=fedevg,fedcgan,fedcvae rounds=200 judge.every=50
"""

TARGET = """Make models for another party's unlabelled inputs, from a finished run.

usage: fedloom target run=DIR data=FILE [data=FILE …] [method=METHOD] [--out FILE] [--json] [--debug]
       fedloom target run=DIR method=ccvr [--out FILE] [--debug]

FILE is an .npz file with inputs x [N, …] as the run's data hold them, an .npy file of them, or, if the run's data were
a table, a .csv or .parquet table with its input columns; labels are not needed. For each file the command prints the
estimated class shares with intervals, the clients that hold training samples of these classes, and a check that the
inputs differ from the clients' data only in their class shares, and writes a model for these shares, as safetensors.
If there are targets (y in the .npz file, or the run's label column), loss and metrics of both models are printed on
standard error; the models do not depend on them.

  method=target_head      the server's model with another head (the default)
  method=target_fit       the clients' last models, mixed with weights fitted to the inputs' estimated classes; the run
                          must have kept them, with evaluation.what=[global,average]; method.steps=60 method.lr=0.2
  method=fedssa           the clients' last models, mixed by FedSSA, learnt once; method.variance=10 method.views=[blur]
  method=target_prior     only class shares, clients and check, no model
  method=ccvr             needs no inputs: the server's model with its head trained again, on features drawn from
                          the clients' class statistics (classifier calibration); against label skew

options:
  --out FILE              the model's file, which must not exist; by default <run>-<file>.safetensors
  --json                  print everything as JSON

Settings of each method: fedloom list target_methods.

examples:
  fedloom target run=runs/2026-01-31/093000-fedavg-0 data=buyer.npz
  fedloom target run=runs/2026-01-31/093000-fedavg-0 data=north.npz data=south.npz method=target_fit
"""

REPORT = """Compare runs on one page, with figures and tables.

usage: fedloom report DIR… [--out DIR] [--figures] [--only NAME,…] [--style NAME,…] [--names FILE] [--best FOLDER]
                          [--watch] [--debug]

A DIR is a run directory or a folder of run directories. The page is written into --out; by default into DIR if there
is only one, otherwise into report/.

options:
  --figures               also write every figure as PDF and SVG, for papers
  --only NAME,…           only these figures, by the names of their files, or patterns like "global_*"
  --style NAME,…          the figures in these styles of matplotlib, its own like grayscale, or files of its settings
  --names FILE            a YAML file with a line for each group of runs to show, its label and the name to print, like
                          "feddyn, alpha=0.1: FedDyn"; the first one is the baseline
  --best FOLDER           also write a recipe of the best settings of each method, on validation samples, into a new
                          folder
  --watch                 while runs are in progress, rewrite the page as they grow; an open page reloads itself
"""

CLAIM = """Keep a register of published claims, which anybody's runs may decide.

usage: fedloom claim list [NAME …] [--claims PATH]
       fedloom claim next [NAME …] [--claims PATH]
       fedloom claim check DIR… [--claims PATH] [--replay N] [--store] [--debug]

A claim is a file: published comparisons, the settings of the runs that decide them, and what is measured. A run
directory whose settings are those of a claim is evidence for it, whoever made it.

  list          the claim files, with the number of claims of each verdict by the stored results; with NAME, every
                claim of these files
  next          files with open claims, those that promise most for their running time first, and the commands to run
                for the first three, or for the files NAME
  check         which of the DIRs, run directories or folders of them, are evidence, and the verdicts that follow from
                them and the stored results; runs are verified, and their first rounds run again and compared bit for
                bit. The exit code is 1 if one is not evidence

options:
  --claims PATH           a claim file, or a folder of them; by default recipes/claims
  --replay N              rounds that are run again, 3 by default; 0 for none
  --store                 add the runs to the results beside the claim

examples:
  fedloom claim next
  fedloom claim list emnist_dir3
  fedloom claim check runs/claims/mnist_iid --store
"""

DEPLOY = """Train a federated method with real clients, which keep their data and their states (docs/deploy.md).

usage: fedloom deploy server [RECIPE.yaml] [key=value …] [--insecure] [-q] [--dry-run] [--debug]
       fedloom deploy node --data DATA --state DIR --server HOST:PORT --ca FILE --key FILE [--epsilon E] [--delta D]
                           [--limit BYTES] [--threads N] [--poll S] [--quota orders=N,…] [--log FILE]
       fedloom deploy local [RECIPE.yaml] [key=value …] [--nodes N] [--insecure] [-q] [--debug]
       fedloom deploy certificates DIR [--hosts NAME,…] [--nodes N or NAME,…]
       fedloom deploy status DIR
       fedloom deploy predict run=DIR [FILE] --data DATA --state DIR [--out FILE]
       fedloom deploy allowed
       fedloom deploy agree STATE
       fedloom deploy why STATE

  server        wait for all nodes to join, then run the recipe; takes keys of fedloom run, its options --quiet,
                --verbose, --json and --log, and:
                  deploy.nodes=4              number of nodes; by default one for each registered key
                  deploy.deadline=600         seconds that a round waits; late answers are dropped
                  deploy.quorum=1             usable answers that a round needs, or the run stops
                  deploy.host=0.0.0.0 deploy.port=9440 deploy.certificates=DIR
                  deploy.inputs=[1,28,28] deploy.classes=10      where the server has no data=… of its own
  node          hold one client's data and answer the server; after a crash or restart it continues where it was
                  --data    an npz file, a folder of images by class, a CSV or parquet table with a column label, or
                            package.module:function
                  --state   its own folder, for what the method keeps at the client
                  --epsilon the privacy budget ε of any one sample over all runs together, for the δ of --delta, 1e-5 by
                            default; with it the node trains only with its own noise, and evaluates nothing
                  --limit   largest message in bytes, 1 GiB by default
                  --threads cores to compute with, 1 by default; with another number results round differently
                  --poll    seconds between two polls for messages, at most; 1 by default
                  --quota   what servers may take: orders=20000 a day, steps=1000000 an order, runs=1000 folders,
                            disk=68719476736 bytes of them
                  --log     the file of its log, by default node.log in its folder
  local         distribute data=… to nodes on this machine, and run server and nodes
  certificates  make an authority, a server certificate for --hosts and this machine, and node keys
  status        how far a run has come, and when each node last answered
  predict       at a node that has a copy of the run directory: predict with the model that it deploys, like fedloom
                predict; without a FILE, measure it on the node's own test samples
  allowed       what a server may set at a node: every key with its range
  agree         at a node: agree to the data specification that its server offered last; the first one is agreed to by
                joining, and another one is refused until then
  why           at a node: why it refused the last orders; a server learns only a code

Connections are encrypted and nodes known by their keys unless --insecure is typed. Needs pip install 'fedloom[flower]'.

examples:
  fedloom deploy local method=feddyn rounds=10 --nodes 4
  fedloom deploy certificates certificates --hosts fed.example.org --nodes clinic-a,clinic-b
  fedloom deploy server recipe.yaml deploy.host=0.0.0.0 out=runs/trial
  fedloom deploy server resume=runs/trial
"""

DEPLOYED = "data state server ca key epsilon delta limit threads poll quota nodes hosts out"  # options with a value

APPLICATIONS = (
    Application(
        "search",
        "find the composition of parts that suits these clients",
        SEARCH,
        "fedloom_apps.search.command:command",
        TRAINS,
        kind="search",
        schema="fedloom_apps.search.command:SEARCH",
        load="fedloom_apps.search.task:load",
        step="run",
    ),
    Application(
        "online",
        "learn from a stream of tasks with bounded memory",
        ONLINE,
        "fedloom_apps.online.config:command",
        TRAINS,
        kind="online",
        schema="fedloom_apps.online.config:ONLINE",
        choices={
            "learners": Listed("learner", "fedloom_apps.online.config:LEARNER", "fedloom online: online methods"),
            "streams": Listed("stream", "fedloom_apps.online.config:STREAM", "fedloom online: streams of tasks"),
        },
        load="fedloom_apps.online:load",
        module="fedloom_apps.online",
        step="task",
    ),
    Application(
        "distill",
        "train a small model, the student, with a larger one as its teacher",
        DISTILL,
        "fedloom_apps.distill.config:command",
        TRAINS,
        kind="distill",
        schema="fedloom_apps.distill.config:DISTILL",
        choices={
            "distillers": Listed(
                "method", "fedloom_apps.distill.config:DISTILLER", "fedloom distill: methods of distillation"
            )
        },
        load="fedloom_apps.distill:load",
        module="fedloom_apps.distill",
    ),
    Application(
        "synthesize",
        "train a method that makes labelled synthetic data, and evaluate the data",
        SYNTHESIZE,
        "fedloom_apps.synthesis.command:command",
        TRAINS,
        kind="synthesis",
        schema="fedloom_apps.synthesis.command:SYNTHESIZE",
    ),
    Application(
        "target",
        "make a model for another party's unlabelled inputs, from a finished run",
        TARGET,
        "fedloom_apps.customise.command:command",
        ("--out=", "--json"),
        choices={
            "target_methods": Listed(
                "method", "fedloom_apps.customise.command:TARGET_METHOD", "methods of fedloom target"
            )
        },
        module="fedloom_apps.customise",
    ),
    Application(
        "report",
        "compare runs on one page",
        REPORT,
        "fedloom_apps.report.command:command",
        ("--out=", "--figures", "--only=", "--style=", "--names=", "--best=", "--watch"),
        after="fedloom_apps.report.command:after",
        show="fedloom_apps.report.notebook:html",
    ),
    Application(
        "deploy",
        "train with real clients: a server, nodes that keep their data, certificates",
        DEPLOY,
        "fedloom_apps.deploy.command:command",
        (*TRAINS[1:], "--insecure", *(f"--{name}=" for name in DEPLOYED.split())),
        schema="fedloom_apps.deploy.settings:DEPLOY",
        load="fedloom_apps.deploy.server:load",
    ),
    Application(
        "claim",
        "keep a register of published claims, which anybody's runs may decide",
        CLAIM,
        "fedloom_apps.claims.command:command",
        ("--claims=", "--replay=", "--store"),
    ),
    Application(
        "attacks",
        module="fedloom_apps.audit.attacks",
    ),
)
"""The applications of this distribution."""
