"""Named methods: one table of compositions of parts.

Each row names the parts of a method, with settings only where they differ from the parts' defaults. The settings of a
method, their defaults and their descriptions are those of its parts: ``feddyn`` accepts what ``FedDynDrift`` accepts.
To add a method, add a row.

>>> make("feddyn", alpha=0.1).drift
FedDynDrift(alpha=0.1, size_weighted=True)
>>> fedavg = make("fedavg")
>>> fedavg.drift.is_identity, fedavg.mixing.is_identity, fedavg.server.is_identity
(True, True, True)

Every method is also a function of this module, ``methods.feddyn(alpha=0.1)``, with a signature and a docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedloom.base.errors import nearest
from fedloom.base.registry import Registry
from fedloom.core.method import Method
from fedloom.core.preset import factory
from fedloom.parts import adaptation, drift, mixing, objectives, personal, server, topology, uplink, weighting

CE = (objectives.CrossEntropy(),)
MEAN = " Mixed by samples; its algorithm has the plain mean, method.mixing=uniform."
MCMAHAN = "mcmahan2017fedavg"
ACAR = "acar2023thesis"

methods: Registry[Method] = Registry("method")
"""All methods by name."""
make = methods.make


def preset(
    name: str,
    make: Callable[[str], Method],
    summary: str,
    note: str = "",
    names: Mapping[str, str] | None = None,
) -> None:
    """Register a row of the table: ``make`` and ``fedloom.core.preset.factory`` are called when it is first used."""
    methods.register_loader(name, lambda: factory(make(name), summary, note, names), f"{__name__}.{name}")


def __getattr__(name: str) -> Callable[..., Method]:
    """The method with that name, as a function of its settings."""
    if name in methods:
        return methods[name].factory
    raise AttributeError(f"there is no method {name!r}; {nearest(name, methods.names())}")


def __dir__() -> list[str]:
    return [*globals(), *methods.names()]


# federated averaging and the two extremes: no communication, and pooled data
preset(
    "fedavg",
    lambda name: Method(name, CE, citation=MCMAHAN),
    "Local SGD on F_i, then the mean weighted by samples: θ ← Σ (n_i/n) θ_i.",
    "McMahan et al. 2017, algorithm 1. Every slot is at its identity.",
)
preset(
    "local",
    lambda name: Method(name, CE, personal=personal.LocalOnly()),
    "No communication: every client trains its own model, round after round, and deploys it.",
)
preset(
    "centralised",
    lambda name: Method(name, CE, pooled=True),
    "SGD on the pooled data of all clients: the oracle that federated methods are compared with.",
    "A round is one client's local training on the union of all clients' data; nothing is communicated.",
)
# against client drift
preset(
    "fedprox",
    lambda name: Method(name, (*CE, objectives.Proximal())),
    "Local SGD on F_i(θ) + (μ/2)‖θ - θ^t‖², then the mean weighted by samples. Li et al., MLSys 2020.",
)
preset(
    "scaffold",
    lambda name: Method(name, CE, drift.Scaffold(), mixing=mixing.Uniform()),
    "Steps along g - c_i + c with control variates c_i, c; unweighted mean. Twice FedAvg's communication.",
    "Karimireddy et al., ICML 2020. Its first round is FedAvg's with uniform mixing.",
)
preset(
    "feddyn",
    lambda name: Method(name, CE, drift.FedDynDrift(), mixing=mixing.Uniform()),
    "Local argmin of F_i(θ) - ⟨h_i, θ⟩ + (α/2)‖θ - θ^t‖², then θ ← mean_S θ_i - h/α.",
    "Acar et al., ICLR 2021; thesis §2.2, algorithm 1.",
)
preset(
    "fedadmm",
    lambda name: Method(name, CE, drift.ADMM(), mixing=mixing.Uniform(), server=server.SGD()),
    "ADMM: local argmin of F_i(w) + ⟨y_i, w⟩ + (ρ/2)‖w - θ^t‖², y_i ← y_i + ρ(w_i - θ^t), mean change of w_i + y_i/ρ.",
    "Gong et al., ICDE 2022, algorithm 1. With all clients in all rounds it is FedDyn.",
    {"server.lr": "server_lr", "server.momentum": ""},
)
preset(
    "fedcm",
    lambda name: Method(name, CE, drift.FedCMDrift()),
    "Client momentum: steps along αg + (1 - α)d, where d is the direction in which the server last moved.",
    "Xu et al. 2021, algorithm 2. With α = 1 it is FedAvg." + MEAN,
)
preset(
    "fednova",
    lambda name: Method(name, CE, drift.FedNovaDrift()),
    "Normalised averaging: Δ = (Σ p_i τ_i) Σ p_i Δ_i/τ_i with τ_i the number of local steps, p_i = n_i/n.",
    "Wang et al., NeurIPS 2020. With equal τ_i it is FedAvg.",
)
preset(
    "fedsplit",
    lambda name: Method(name, CE, drift.FedSplitDrift(), mixing=mixing.Uniform()),
    "Operator splitting: u_i ≈ prox of sF_i at 2x - z_i, z_i ← z_i + 2(u_i - x), x ← mean z_i, by local SGD.",
    "Pathak & Wainwright, NeurIPS 2020; for partial participation Acar, thesis 2023, §A.1.1.",
)
preset(
    "feddc",
    lambda name: Method(name, CE, drift.FedDCDrift(), mixing=mixing.Uniform()),
    "Local argmin of F_i(θ) + (α/2)‖h_i + θ - θ^t‖² + (1/(ηk))⟨θ, g_i - g⟩, h_i ← h_i + θ_i - θ^t, mean of θ_i + h_i.",
    "Gao et al., CVPR 2022. One and a half times FedAvg's communication.",
)
preset(
    "fedsam",
    lambda name: Method(name, (*CE, objectives.Sharpness())),
    "Local steps along ∇F_i(w + ρ∇F_i(w)/‖∇F_i(w)‖), towards flat minima; two passes a step, FedAvg's communication.",
    "Qu et al., ICML 2022, algorithm 1. With ρ = 0 it is FedAvg.",
)
preset(
    "mofedsam",
    lambda name: Method(name, (*CE, objectives.Sharpness()), drift.FedCMDrift()),
    "FedSAM's gradients along FedCM's direction: steps along αg(w + ρg/‖g‖) + (1 - α)d.",
    "Qu et al., ICML 2022, algorithm 2. With ρ = 0 it is FedCM." + MEAN,
)
preset(
    "fedgamma",
    lambda name: Method(
        name,
        (*CE, objectives.Sharpness()),
        drift.Scaffold(),
        mixing=mixing.Uniform(),
        citation="dai2023fedgamma",
    ),
    "FedSAM's gradients along SCAFFOLD's direction: steps along g(w + ρg/‖g‖) - c_i + c; unweighted mean.",
    "Dai et al. 2023, as in the code of one of its authors (Yan Sun's FL-Simulator). With ρ = 0 it is SCAFFOLD.",
)
preset(
    "fedspeed",
    lambda name: Method(
        name,
        (*CE, objectives.Sharpness(rho=0.1, unit=False)),
        drift.FedDCDrift(alpha=10.0, gradient=False, average_over_all=False),
        mixing=mixing.Uniform(),
    ),
    "Argmin of F_i(θ) + (α/2)‖h_i + θ - θ^t‖² by steps along (1 - β)g(w) + βg(w + ρg), then the mean of θ_i + h_i.",
    "Sun et al., ICLR 2023, algorithm 1, with α = 1/λ, ĝ_i = -αh_i. With ρ = 0 it is FedDC without its gradient term.",
)
preset(
    "feddecorr",
    lambda name: Method(name, (*CE, objectives.Decorrelation())),
    "Local SGD on F_i(θ) + (β/d²)‖K‖_F², K the correlations of a batch's features; mean weighted by samples.",
    "Shi et al., ICLR 2023. With β = 0 it is FedAvg.",
)
# mixing coefficients for fairness between clients, from the losses of the received model
preset(
    "afl",
    lambda name: Method(name, CE, mixing=mixing.AFL()),
    "Agnostic: p ← Proj_Δ(p + γF), towards min_θ max_p Σ p_i F_i. All clients in all rounds. Mohri et al., ICML 2019.",
)
preset(
    "feddisco",
    lambda name: Method(name, CE, mixing=mixing.Discrepancy()),
    "p_k ∝ max(0, n_k/n - a·d_k + b), d_k how far a client's class shares are from equal. Ye et al., ICML 2023.",
)
preset(
    "q_ffl",
    lambda name: Method(name, CE, mixing=mixing.QFFL()),
    "q-FedAvg: p_i ∝ n_i F_i^q, Δ = Σ n_i F_i^q LΔ_i / Σ n_i (qF_i^{q-1}‖LΔ_i‖² + LF_i^q), L = 1/η. Li et al., 2020.",
)
preset(
    "term",
    lambda name: Method(name, CE, mixing=mixing.TERM()),
    "Tilted risk: p_i ∝ n_i exp(λF_i). Li et al., ICLR 2021.",
)
preset(
    "propfair",
    lambda name: Method(name, (objectives.PropFair(),)),
    "Proportional fairness: local steps on -log(M - ℓ), a line where M - ℓ < ε; the mean weighted by samples.",
    "Zhang et al., 2022, as its authors run it. With cross entropy and the mixing part ``propfair``, the factor "
    "1/(M - F) goes into the mixing coefficients instead (Hahn 2024, table 3.2).",
)
preset(
    "fedmgda",
    lambda name: Method(name, CE, mixing=mixing.FedMGDA()),
    "FedMGDA+: θ ← θ - η Σ λ_i Δ_i/‖Δ_i‖, the shortest such mixture with |λ_i - n_i/n| ≤ ε. Hu et al., 2022.",
)
preset(
    "aaggff_s",
    lambda name: Method(name, CE, mixing=mixing.AAggFFS()),
    "AAggFF for silos: p by online Newton steps on CDF(F_i/F̄)/K. All clients in all rounds. Hahn et al., ICML 2024.",
)
preset(
    "aaggff_d",
    lambda name: Method(name, CE, mixing=mixing.AAggFFD()),
    "AAggFF for devices: p_i ∝ exp(-√(log K) Σ ğ_i / (Ľ√(t+1))), doubly robust gradients ğ. Hahn et al., ICML 2024.",
)
# less to send; method.uplink=[top_k] and so on makes any other method do so
preset(
    "fedpaq",
    lambda name: Method(name, CE, mixing=mixing.Uniform(), uplink=(uplink.QSGD(),)),
    "The unweighted mean of updates, quantised without bias to a few bits per number. Reisizadeh et al., AISTATS 2020.",
    names={"uplink.0.slices": ""},
)
# less to know; method.uplink=clip_noise makes any other method private whose uploads have bounds
preset(
    "dp_fedavg",
    lambda name: Method(name, CE, mixing=mixing.Uniform(), uplink=(uplink.ClipNoise(),)),
    "Client-level differential privacy: updates clipped to C, N(0, z²C²) on their sum. McMahan et al., ICLR 2018.",
    "Clipping adapts with ``quantile`` (Andrew et al. 2021); ε needs the extra ``privacy``.",
)
# mixing that survives hostile clients; method.mixing=krum and so on makes any other method do so
preset(
    "coordinate_median",
    lambda name: Method(name, CE, mixing=mixing.CoordinateMedian()),
    "Δ_j = median_i Δ_ij in every coordinate: survives fewer than half of the clients. Yin et al., ICML 2018.",
)
preset(
    "trimmed_mean",
    lambda name: Method(name, CE, mixing=mixing.TrimmedMean()),
    "The mean of every coordinate without its largest and smallest values: survives that many. Yin et al., ICML 2018.",
)
preset(
    "krum",
    lambda name: Method(name, CE, mixing=mixing.Krum()),
    "The update closest to its n - f - 2 nearest neighbours. Blanchard et al., NeurIPS 2017.",
    names={"mixing.selected": ""},
)
preset(
    "multi_krum",
    lambda name: Method(name, CE, mixing=mixing.Krum(selected=None)),
    "The mean of the n - f updates closest to their n - f - 2 nearest neighbours. Blanchard et al., 2017.",
)
preset(
    "rfa",
    lambda name: Method(name, CE, mixing=mixing.GeometricMedian()),
    "Robust federated averaging: geometric median of the updates, by smoothed Weiszfeld steps. Pillutla et al., 2022.",
)
preset(
    "centred_clipping",
    lambda name: Method(name, CE, mixing=mixing.CentredClipping()),
    "v ← v + mean of Δ_i - v clipped to length τ, from the last round's v; θ ← θ - v. Karimireddy et al., ICML 2021.",
)
preset(
    "norm_bounding",
    lambda name: Method(name, CE, mixing=mixing.NormBounding()),
    "FedAvg with updates clipped at the server: Δ = Σ (n_i/n) min(1, C/‖Δ_i‖) Δ_i. Sun et al. 2019.",
)
preset(
    "fltrust",
    lambda name: Method(name, CE, mixing=mixing.FLTrust()),
    "Updates rescaled to the norm of the server's own, weighted by positive cosine with it. Cao et al., NDSS 2021.",
    "The server's data are those of one client, which takes part in every round. All clients in all rounds.",
)
# networks of different sizes, and several networks
preset(
    "fedhen",
    lambda name: Method(name, CE, personal=personal.EarlyExitSlice(), mixing=mixing.Uniform()),
    "Simple clients train up to the early exit, complex ones the whole network at both exits. Acar & Saligrama 2022.",
    "``f(w) + σ f([w]_M)``; the shared part M is the mean over all active clients, the rest over the complex ones.",
)
preset(
    "noside",
    lambda name: Method(name, CE, personal=personal.EarlyExitSlice(side_weight=0.0), mixing=mixing.Uniform()),
    "FedHeN without the side objective, which is HeteroFL's rule by depth. Acar, thesis, algorithm 9.",
    names={"personal.side_weight": ""},
)
preset(
    "decouple",
    lambda name: Method(name, CE, personal=personal.Decoupled(), mixing=mixing.Uniform()),
    "FedAvg twice, separately: for the simple and for the complex network. Acar, thesis, algorithm 8.",
)
preset(
    "heterofl",
    lambda name: Method(name, CE, personal=personal.WidthSlice(), mixing=mixing.Uniform()),
    "Clients hold the first channels of each layer; parameters are averaged over their holders. Diao et al., 2021.",
)
preset(
    "ifca",
    lambda name: Method(name, CE, mixing=mixing.Uniform(), topology=topology.Clusters()),
    "k models at the server; a client trains the one with the lowest loss on its samples. Ghosh et al., NeurIPS 2020.",
)
preset(
    "cfl",
    lambda name: Method(name, CE, topology=topology.Bipartition()),
    "FedAvg in clusters; one whose mean update vanishes is divided by the cosines of updates. Sattler et al., 2021.",
    "Algorithms 1 and 3. A division needs ``mean_below`` and ``some_above`` at the scale of the updates.",
)
# stronger local objectives; each works with any drift correction, mixing and server optimiser
preset(
    "moon",
    lambda name: Method(name, (*CE, objectives.Contrastive())),
    "MOON: cross entropy - μ log[e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ})] on features z.",
    "Li, He & Song, CVPR 2021. Keeps every client's last model.",
)
preset(
    "fedntd",
    lambda name: Method(name, (*CE, objectives.NotTrueDistillation())),
    "Not-true distillation: cross entropy + β τ² KL(q̃_glob‖q̃), with softmax q̃ over all classes but the true one.",
    "Lee et al., NeurIPS 2022. With β = 0 it is FedAvg.",
)
preset(
    "fedlc",
    lambda name: Method(name, (objectives.CalibratedLogits(),)),
    "Logit calibration: cross entropy of z_c - τ n_c^{-1/4}, with n_c the client's samples of class c.",
    "Zhang et al., ICML 2022. With τ = 0 it is FedAvg.",
)
preset(
    "fedrs",
    lambda name: Method(name, (objectives.RestrictedSoftmax(),)),
    "Restricted softmax: cross entropy with the logits of classes that a client lacks times α.",
    "Li & Zhan, KDD 2021. With α = 1 it is FedAvg.",
)
preset(
    "distill",
    lambda name: Method(name, (objectives.Distillation(),), citation=ACAR),
    "Clients minimise α·cross entropy + (1 - α)·τ² KL(teacher‖model) at temperature τ.",
    "Acar, thesis 2023, §7.2, eq. (7.3). Needs ``teacher=``, the run of a trained model; with α = 1 it is FedAvg.",
)
preset(
    "disk",
    lambda name: Method(name, (objectives.Selective(),), citation=ACAR),
    "Selective distillation in a federation: a guide decides where the model need not follow its teacher.",
    "Our composition of what Acar, thesis 2023, names as the next step in §7.2: DiSK (ch. 6) as the clients' "
    "objective, with a guide of C + 1 numbers that is federated like the model. Needs ``teacher=``, the run of a "
    "trained model; with K = 0 it is distillation.",
)
preset(
    "robust",
    lambda name: Method(name, (objectives.Robustness(),), citation=ACAR),
    "Clients minimise α·cross entropy + (1 - α)·τ² KL between the predictions for two augmentations of a sample.",
    "Acar, thesis 2023, §7.2, eq. (7.2). Needs ``augment=``; with α = 1 it is FedAvg.",
    {"objective.0.labels": ""},
)
preset(
    "distill_robust",
    lambda name: Method(
        name, (objectives.Distillation(), objectives.Robustness(alpha=0.1, labels=False)), citation=ACAR
    ),
    "Distillation and robustness together: α·cross entropy + (1 - α)·τ² KL(teacher‖model) + (1 - α)·τ² KL of views.",
    "Acar, thesis 2023, §7.2, eq. (7.4). Needs ``teacher=`` and ``augment=``; with α = 1 it is FedAvg.",
    {"objective.1.labels": ""},
)
# meta-learning: models trained to be adapted; method.adaptation=maml or proto does this for any method
preset(
    "per_fedavg",
    lambda name: Method(name, CE, adaptation=adaptation.Maml()),
    "Per-FedAvg: FedAvg on F_i∘T_i, where T_i is one or several gradient steps. Fallah et al., NeurIPS 2020.",
)
preset(
    "p_avg_proto",
    lambda name: Method(name, CE, adaptation=adaptation.Prototypes()),
    "FedAvg on F_i∘T_i, where T_i classifies by the nearest class mean of features. Acar, thesis 2023, ch. 3.",
)
preset(
    "pfldyn",
    lambda name: Method(
        name, CE, drift.FedDynDrift(alpha=0.1), adaptation=adaptation.Prototypes(), mixing=mixing.Uniform()
    ),
    "PFLDyn (Proto): FedDyn on F_i∘T_i; PFLDyn (MAML) is the same with ``method.adaptation=maml``.",
    "Acar, thesis 2023, §3.3, algorithms 2 and 3, where α is chosen from 0.1 and 0.01.",
)
preset(
    "pflscaf",
    lambda name: Method(name, CE, drift.Scaffold(), adaptation=adaptation.Prototypes(), mixing=mixing.Uniform()),
    "PFLScaf (Proto): SCAFFOLD on F_i∘T_i; PFLScaf (MAML) is the same with ``method.adaptation=maml``.",
    "Acar, thesis 2023, §3.3, algorithms 2 and 3.",
)
# a global model that clients complete when they deploy it
preset(
    "fedrod",
    lambda name: Method(name, (objectives.BalancedSoftmax(),), adaptation=adaptation.PersonalHead()),
    "A global model trained by the balanced softmax, and a personal linear head at each client. Chen & Chao, 2022.",
    "The personal head is fitted at deployment, since it does not influence the shared model. See ``PersonalHead``.",
)
preset(
    "knn_per",
    lambda name: Method(name, CE, adaptation=adaptation.Neighbours()),
    "FedAvg; a client mixes the model with the votes of its k nearest training samples. Marfoq et al., ICML 2022.",
)
# private parameters
preset(
    "fedper",
    lambda name: Method(name, CE, personal=personal.PrivateHead()),
    "The body is shared and averaged, each client keeps its own head; both are trained together.",
    "Arivazhagan et al. 2019. A client that never participated deploys the shared body with the initial head.",
)
preset(
    "lg_fedavg",
    lambda name: Method(name, CE, personal=personal.PrivateBody()),
    "The head is shared and averaged, each client keeps its own body. Liang et al. 2020.",
)
preset(
    "fedrep",
    lambda name: Method(name, CE, personal=personal.Alternating()),
    "First the private head is trained, then the shared body. Collins et al., 2021." + MEAN,
)
preset(
    "fedbn",
    lambda name: Method(name, CE, personal=personal.PrivateNorm()),
    "Normalisation layers, statistics included, stay at the client. Li et al., ICLR 2021." + MEAN,
)
preset(
    "fedbabu",
    lambda name: Method(name, CE, personal=personal.Alternating(head_fraction=0.0), adaptation=adaptation.FineTune()),
    "Only the body is trained and averaged, with the head frozen at its start; clients then fine-tune the model.",
    "Oh, Kim & Yun, ICLR 2022. Fine-tuning takes gradient steps on all of a client's samples instead of epochs.",
    {"personal.head_fraction": ""},
)
preset(
    "fedproto",
    lambda name: Method(name, (*CE, objectives.PrototypeAlignment()), personal=personal.LocalOnly()),
    "Clients keep their models and exchange class means C_y of features: cross entropy + (λ/d)‖r(x) - C_y‖².",
    "Tan et al., AAAI 2022. With λ = 0 it is local training.",
)
preset(
    "fedtgp",
    lambda name: Method(name, (*CE, objectives.TrainablePrototypes()), personal=personal.LocalOnly()),
    "FedProto with prototypes that the server trains on the clients' class means to lie apart, by a contrastive loss.",
    "Zhang et al., AAAI 2024. With λ = 0 it is local training.",
)
preset(
    "fedgh",
    lambda name: Method(name, (*CE, objectives.HeadOnMeans()), personal=personal.PrivateBody()),
    "Own bodies and one head, which the server trains on the clients' class means of features. Yi et al., 2023.",
    "With epochs=0 clients start every round from the run's first head.",
)
preset(
    "feddistill",
    lambda name: Method(name, (*CE, objectives.ClassOutputs()), personal=personal.LocalOnly()),
    "Clients keep their models and exchange mean outputs by class: cross entropy + γ·H(F̂_y, p(x)), F̂ of the others.",
    "Jeong et al. 2018. With γ = 0 it is local training.",
)
preset(
    "fedmd",
    lambda name: Method(name, (*CE, objectives.Consensus()), personal=personal.LocalOnly()),
    "Clients keep their models, and learn the mean f̃ of their scores for public inputs, then their own samples.",
    "Li & Wang 2019. The server sends unlabelled inputs with every round. With epochs=0 it is local training. See "
    "``Consensus``.",
)
preset(
    "feddbe",
    lambda name: Method(name, (*CE, objectives.FeatureMean()), personal=personal.BiasMemory()),
    "Features r(x) + b_i with a vector b_i of the client's own, and (κ/d)‖mean r(x) - m̄‖² beside the loss.",
    "Zhang et al., NeurIPS 2023; m̄ is the mean feature of the first round's clients. See ``FeatureMean``.",
)
preset(
    "fedphp",
    lambda name: Method(name, (*CE, objectives.Inheritance()), personal=personal.Inherited()),
    "Local work learns from h_i ← μ_i h_i + (1 - μ_i) θ_i, an average of the client's own models, which is deployed.",
    "Li et al., ECML PKDD 2021. With λ = 0 the server's model is FedAvg's. See ``Inheritance``.",
)
preset(
    "fml",
    lambda name: Method(name, (objectives.Mutual(),), personal=personal.OwnNetwork()),
    "An own network p beside a shared one q, which learn from each other: α ℓ(p) + (1 - α) KL(q‖p), likewise for q.",
    "Shen et al. 2020. With α = β = 1 the own network is trained alone, and the shared one is FedAvg's.",
    {"personal.align": ""},
)
preset(
    "fedkd",
    lambda name: Method(name, (objectives.AdaptiveMutual(),), personal=personal.OwnNetwork(align=True)),
    "An own teacher and a shared student, ℓ(p) + [KL(q‖p) + (1/d)‖r_p - W r_q‖²] / (ℓ(p) + ℓ(q)), and likewise for q.",
    "Wu et al., Nature Communications 2022.",
    {"personal.align": ""},
)
preset(
    "apfl",
    lambda name: Method(name, CE, personal=personal.APFL()),
    "w as in FedAvg, and v ← v - ηα∇F_i(αv + (1 - α)w); the mixture is deployed. Deng et al. 2020." + MEAN,
)
preset(
    "fedala",
    lambda name: Method(name, CE, personal=personal.Merged()),
    "Local work starts at θ_i + (θ^t - θ_i) ⊙ W with learnt weights W, which is deployed. Zhang et al., AAAI 2023.",
)
preset(
    "ditto",
    lambda name: Method(name, CE, personal=personal.Ditto()),
    "w as in FedAvg; v minimises F_i(v) + (λ/2)‖v - θ^t‖² and is deployed. Li et al., ICML 2021." + MEAN,
)
preset(
    "pfedme",
    lambda name: Method(name, CE, personal=personal.PFedMe(), server=server.SGD()),
    "Moreau envelopes: v ≈ argmin F_i(v) + (λ/2)‖v - w‖², w ← w - ηλ(w - v). T. Dinh, Tran & Nguyen 2020.",
    "At the server θ ← (1 - β)θ + β·mean." + MEAN,
    {"server.lr": "beta", "server.momentum": ""},
)
preset(
    "superfed_mm",
    lambda name: Method(name, CE, personal=personal.Subspace()),
    "SuPerFed, model mixing: loss at (1 - λ)w + λv, λ ~ U(0, 1), + (μ/2)‖w - θ^t‖² + ν cos²(w, v). Hahn et al., 2022.",
    names={"personal.layers": ""},
)
preset(
    "superfed_lm",
    lambda name: Method(name, CE, personal=personal.Subspace(layers=True)),
    "SuPerFed, layer mixing: as ``superfed_mm``, with one λ per layer. Hahn et al., 2022.",
    names={"personal.layers": ""},
)
# several models: without a server, at edge servers, for every client; method.topology= makes others of any method
preset(
    "dpsgd",
    lambda name: Method(name, CE, topology=topology.Ring(combine_first=True), citation="lian2017dpsgd"),
    "Decentralised SGD on a ring: θ_i ← Σ_j B_ij θ_j - step_i, with every client's own model. Lian et al., 2017.",
    "Algorithm 1, with local.steps=1; other graphs by method.topology.",
    {"topology.combine_first": "", "topology.push_sum": ""},
)
preset(
    "dfedavgm",
    lambda name: Method(name, CE, topology=topology.Ring(), citation="sun2023dfedavgm"),
    "Decentralised FedAvg on a ring: local steps with momentum, then θ_i ← Σ_j B_ij θ_j. Sun et al., 2023.",
    "Algorithm 1, with local.momentum=0.9; other graphs by method.topology.",
    {"topology.combine_first": "", "topology.push_sum": ""},
)
preset(
    "gossip",
    lambda name: Method(name, CE, topology=topology.RandomPairs()),
    "Clients train, are paired at random in every round, and each pair takes the mean of its models.",
    names={"topology.combine_first": "", "topology.push_sum": ""},
)
preset(
    "sgp",
    lambda name: Method(
        name, CE, topology=topology.Exponential(one_peer=True, push_sum=True), citation="assran2019sgp"
    ),
    "Stochastic gradient push: clients push shares of models and weights along a directed graph. Assran et al., 2019.",
    "Algorithm 1, with local.steps=1; a graph from a file by method.topology=edge_list.",
    {"topology.combine_first": "", "topology.push_sum": ""},
)
preset(
    "kgt",
    lambda name: Method(name, CE, drift.GradientTracking(), topology=topology.Ring()),
    "Gradient tracking on a ring: steps along g + c_i with c_i ← c_i - z_i + Σ_j B_ij z_j. Liu et al., 2024.",
    "SCAFFOLD's sibling without a server: no bias with a constant step; other graphs by method.topology.",
    {"topology.combine_first": "", "topology.push_sum": ""},
)
preset(
    "hierfavg",
    lambda name: Method(name, CE, topology=topology.Hierarchy()),
    "FedAvg at edge servers, whose models a cloud averages every ``cloud_every`` rounds. Liu et al., ICC 2020.",
)
preset(
    "fedamp",
    lambda name: Method(
        name, (*CE, objectives.Proximal(mu=1.0)), personal=personal.OwnStart(), topology=topology.Attention()
    ),
    "Own models w_i pulled to u_i = Σ_j ξ_ij w_j, a mean that weighs similar models more. Huang et al., AAAI 2021.",
    "μ is λ/α of the paper.",
)
preset(
    "pfedgraph",
    lambda name: Method(name, (*CE, objectives.CosinePull()), topology=topology.Collaboration()),
    "Client i receives Σ_j B_ij w_j, B_i = argmin_{b∈Δ} Σ_j [α(b_j - n_j/n)² - b_j cos_ij], of similar models more.",
    "Ye et al., ICML 2023; cos_ij of how models have moved, and λ(1 - cos(θ, θ^t)) beside the loss.",
)
preset(
    "fedpac",
    lambda name: Method(
        name, (*CE, objectives.PrototypeAlignment()), personal=personal.InTurn(), topology=topology.CombinedHeads()
    ),
    "One body, with features drawn to common class means, and heads Σ_j α_ij h_j by a programme for each client.",
    "Xu, Tong & Huang, ICLR 2023: first an epoch of the head, then five of the body. See ``CombinedHeads``.",
)
preset(
    "apple",
    lambda name: Method(name, CE, personal=personal.Combined(), topology=topology.Cores()),
    "Clients train own models w_i and weights p_i in Σ_j p_ij w_j, of all clients' models. Luo & Wu, IJCAI 2022.",
    "p_i is drawn to shares of samples at first; every client downloads all models, or ``models`` of them.",
)
# slow and absent clients; schedule=buffered and so on makes any other method asynchronous
preset(
    "fedbuff",
    lambda name: Method(name, CE, mixing=mixing.Uniform(), weighting=(weighting.Staleness(),), server=server.SGD()),
    "Buffered asynchronous learning: θ ← θ - η (1/k) Σ (1 + s_i)^-1/2 Δ_i over k clients of staleness s_i.",
    "Nguyen et al., AISTATS 2022, algorithm 1, with schedule=buffered. In rounds it is FedAvgM with uniform mixing.",
    {"weighting.0.rule": "", "weighting.0.b": "", "weighting.0.models": "", "server.lr": "server_lr"},
)
preset(
    "fedasync",
    lambda name: Method(
        name,
        (*CE, objectives.Proximal(mu=0.005)),
        server=server.SGD(lr=0.6),
        weighting=(weighting.Staleness(models=True),),
        citation="xie2019fedasync",
    ),
    "Asynchronous mixing of models: θ ← (1 - α w(s))θ + α w(s) θ_i for one client of staleness s at a time.",
    "Xie et al. 2019, algorithm 1, with schedule=asynchronous.",
    {"weighting.0.models": "", "server.lr": "alpha", "server.momentum": ""},
)
preset(
    "mifa",
    lambda name: Method(name, CE, drift.CachedUpdates(mean=True), mixing=mixing.Uniform()),
    "Absent clients count with their last update: θ ← θ - (1/K) Σ_i h_i, h_i ← Δ_i at those that take part.",
    "Gu et al., NeurIPS 2021, algorithm 1. Twice FedAvg's upload.",
    {"drift.mean": ""},
)
preset(
    "ca2fl",
    lambda name: Method(name, CE, drift.CachedUpdates(), mixing=mixing.Uniform()),
    "Cached updates calibrate those of a buffer: θ ← θ - h - (1/k) Σ (Δ_i - h_i), h = (1/K) Σ_i h_i.",
    "Wang et al., ICLR 2024, algorithm 2, with schedule=buffered. Twice FedAvg's upload.",
    {"drift.mean": ""},
)
preset(
    "dcasgd",
    lambda name: Method(name, CE, drift.DelayCompensation(), mixing=mixing.Uniform()),
    "Stale updates are corrected to first order: Δ_i + (λ/(a_i η)) Δ_i ⊙ Δ_i ⊙ (θ^t - θ^s).",
    "Zheng et al., ICML 2017, equation (10), with schedule=asynchronous or buffered.",
)
# another server optimiser on Δ = Σ p_i (θ^t - θ_i)
preset(
    "fedavgm",
    lambda name: Method(name, CE, server=server.SGD(momentum=0.9)),
    "Server momentum: m ← βm + Δ, θ ← θ - ηm. Hsu et al. 2019. With β = 0 and η = 1 it is FedAvg.",
)
preset(
    "fedacg",
    lambda name: Method(
        name, (*CE, objectives.Proximal(mu=0.002)), mixing=mixing.Uniform(), server=server.Accelerated()
    ),
    "Clients start from θ̂ = θ - λm and minimise F_i(w) + (μ/2)‖w - θ̂‖²; m ← λm + mean of θ̂ - θ_i, θ ← θ - m.",
    "Kim, Kim & Han, CVPR 2024. With λ = 0 it is FedProx with the plain mean. λ and μ are those of the authors' code, "
    "whose weight .001 has no factor ½.",
    {"server.lr": "server_lr"},
)
preset(
    "fedadam",
    lambda name: Method(name, CE, server=server.Adam()),
    "Adam at the server: v ← β₂v + (1-β₂)Δ², θ ← θ - η m/(√v + τ). Reddi et al., ICLR 2021.",
)
preset(
    "fedyogi",
    lambda name: Method(name, CE, server=server.Yogi()),
    "Yogi at the server: v ← v - (1-β₂)Δ² sign(v - Δ²), θ ← θ - η m/(√v + τ). Reddi et al., ICLR 2021.",
)
preset(
    "fedadagrad",
    lambda name: Method(name, CE, server=server.Adagrad()),
    "Adagrad at the server: v ← v + Δ², θ ← θ - η m/(√v + τ). Reddi et al., ICLR 2021 (β₁ = 0 in its experiments).",
)
preset(
    "fedexp",
    lambda name: Method(name, CE, mixing=mixing.Uniform(), server=server.Extrapolated()),
    "Extrapolation: θ ← θ - ηΔ, η = max{1, Σ‖Δ_i‖² / (2|S|(‖Δ‖² + ε))}, unweighted mean. Jhunjhunwala et al., 2023.",
)
# federated generation of labelled synthetic data
preset(
    "fedevg",
    lambda name: Method(name, (*CE, objectives.Energy()), personal=personal.Reinitialised()),
    "Server's samples x ← x - β_t Σ p_i e_i ∇E_i(x) / Σ p_i e_i + δε, E_i = -f_i(x)[y] learnt by clients. FedEvg.",
    "Hahn 2024, chapter IV. Clients train f_i on cross entropy + E(x, y) - E(x̆, y̆) + λ CE(f(x̃), y̆); x̆ are the samples "
    "after Langevin steps. No model parameter crosses the network. See ``Energy``.",
)
preset(
    "fedevg_kept",
    lambda name: Method(name, (*CE, objectives.Energy(magnitude=0.1)), personal=personal.LocalOnly()),
    "FedEvg whose clients keep their models between rounds instead of reinitialising them.",
    "Kept models want short, gentle local work (5 steps of Adam at 5e-4 where new ones take 15 at 1e-3) and a β a few "
    "times smaller; with a class or two a client also raw weights and a magnitude of a few hundredths.",
)
preset(
    "fedcgan",
    lambda name: Method(name, (objectives.Adversarial(),)),
    "FedAvg on both networks of a conditional GAN: ς(-D(x, y)) + ς(D(G(z, y), y)) for D, ς(-D(G(z, y), y)) for G.",
    "Rasouli, Sun & Rajagopal, 2020, with labels; ς(a) = log(1 + e^a). Both are trained at once. See ``Adversarial``.",
)
preset(
    "fedcvae",
    lambda name: Method(name, (objectives.Variational(),)),
    "FedAvg on a conditional variational autoencoder: -log p(x | z, y) + β KL(q(z | x, y)‖N(0, I)).",
    "Sohn, Lee & Yan, 2015, in a federation as in Hahn, 2024, IV.4. All parameters are averaged. See ``Variational``.",
)
# a model for every client
preset(
    "fedfomo",
    lambda name: Method(name, CE, topology=topology.FirstOrder()),
    "Client i's θ_i ← Σ_n B_in w_n over the round's new models, B_in ∝ max(0, (F_i(θ_i) - F_i(w_n))/‖w_n - θ_i‖).",
    "Zhang et al., ICLR 2021. F_i on validation samples if there are any. A client hears all of the round, or the "
    "``models`` that suited it best so far. See ``FirstOrder``.",
)
# models for a target distribution of which the server holds unlabelled inputs
preset(
    "fedssa",
    lambda name: Method(name, CE, mixing=mixing.SelfSupervised()),
    "θ ← Σ p_k θ_k, p = argmin of -cos(ŷ¹, ŷ²) - λ_var var ŷ + λ_we Σ p log p, ŷ = softmax(Σ p_k logits_k). FedSSA.",
    "ŷ¹ and ŷ² are predictions on two views of the target's unlabelled inputs; section 4.2. FedAvg whose last client "
    "models are mixed; algorithm 1, which mixes in every round, is ``feed_back=True``.",
)
preset(
    "fedssa_similarity",
    lambda name: Method(name, CE, mixing=mixing.Similarity()),
    "p_k ∝ mean cos(ŷ_k¹, ŷ_k²): models are weighted by their agreement on two views of an input. FedSSA, appendix D.",
)
preset(
    "fedssa_confidence",
    lambda name: Method(name, CE, mixing=mixing.Confidence()),
    "p_k ∝ mean var ŷ_k: models are weighted by their confidence on target inputs. FedSSA, appendix D.",
)
preset(
    "feddf",
    lambda name: Method(name, CE, server=server.Ensemble()),
    "FedAvg, then KL(softmax(mean of client logits) ‖ softmax(logits of θ)) on target inputs. Lin et al., 2020.",
)
