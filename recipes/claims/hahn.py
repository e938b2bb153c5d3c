"""Claims of Hahn's thesis: SuPerFed, AAggFF, FedEvg."""

from __future__ import annotations

from statistics import fmean

from protocol import Claim

from .measures import BEST, FID, IMAGES, PERCENT, Result, claims

GENERATORS = ("FedCGAN", "FedCVAE")
DEVICES = ("FedAvg", "q-FedAvg", "TERM", "FedMGDA+", "PropFair")
CDFS = ("weibull", "frechet", "gumbel", "exponential", "logistic", "normal")
BRIEF = ("FedAvg", "FedPer", "APFL", "Ditto")
CIFAR100_RIVALS = (*BRIEF, "FedProx", "SCAFFOLD", "LG-FedAvg", "FedRep")
NOISY = ("FedProx", "SCAFFOLD", "LG-FedAvg", "FedRep", *BRIEF)
PERSONAL = ("pFedMe", *NOISY)
CIFAR100, SHAKESPEARE = "columns > cifar100_1 > runs", "columns > shakespeare > runs"
OTHER_IMAGES = "Fashion-MNIST instead of TinyImageNet"
RESPLITS = (
    "The 190 seeds of Heart split the same 920 patients again: intervals and verdicts hold for these patients. For new "
    "ones the intervals would be about seven times as wide, by Nadeau and Bengio's correction "
    "√((1/190 + 1/4)/(1/190)), and would decide nothing. The thesis calls the average AUROC comparable; its figures "
    "are higher with AAggFF (FedProx with AAggFF: 85.04, in the ICML paper 85.72)."
)

OTHER_START = {clients: f"L is .2 T (MM) and .4 T (LM), and {starts} in the authors' scripts"
               for clients, starts in ((100, ".4 and .6 T"), (50, ".6 and .8 T"))}  # fmt: skip


def looks(data: str, name: str) -> int:
    """How often AAggFF in another algorithm was judged: on Heart first on 30 of the 190 splits, but for FedProx."""
    return 1 + (data == "heart_published" and not name.startswith("FedProx"))


RESULTS: dict[str, Result] = {
    "superfed/table_2_3": Result("SuPerFed on MNIST, two classes a client (Hahn)", "", [
        *claims("table 2.3", "500 clients: {}, λ chosen by validation, is ahead of {}",
                "runs > 500 > {} > * > validation > mean > -1", ("SuPerFed-MM", PERSONAL, "99.24 : 98.98"),
                differs="λ chosen on validation images", **PERCENT),
        Claim("table 2.3", "500 clients: SuPerFed-MM, λ by test images as published, is ahead of all rivals run here",
              "runs > 500 > SuPerFed-MM > * > as published > mean > -1",
              tuple(f"runs > 500 > {name} > * > validation > mean > -1" for name in PERSONAL), "99.24 : 98.98",
              on_test=True, **PERCENT),
        *claims("table 2.3", "100 clients: {} is ahead of {}", "runs > 100 > {} > * > validation > mean > -1",
                ("SuPerFed-MM", PERSONAL, "99.38 : 99.19"),
                differs="APFL, Ditto and pFedMe with 24 of 500 rounds", **PERCENT),
        *claims("table 2.3", "50 clients: {} is ahead of {}", "runs > 50 > {} > * > validation > mean > -1",
                ("SuPerFed-LM", PERSONAL, "99.48 : 99.40"), differs="12 of 500 rounds", **PERCENT),
    ]),
    "superfed/table_2_3_scripts": Result("SuPerFed on MNIST, the scripts' settings (Hahn)", "", [
        *(Claim("table 2.3", f"{clients} clients: {method}, λ by test images as published, is ahead of {says}",
                f"runs > {clients} > {method} > * > as published > mean > -1",
                tuple(f"runs > {clients} > {name} > * > validation > mean > -1" for name in rivals), published,
                differs=OTHER_START.get(clients, ""), scripts=True, on_test=True, looks=1 + (clients == 500), **PERCENT)
          for clients, method, says, rivals, published in (
              (500, "SuPerFed-MM", "all rivals run here", PERSONAL, "99.24 : 98.98"),
              (500, "SuPerFed-MM", "APFL", ("APFL",), "99.24 : 98.98"),
              (500, "SuPerFed-MM", "FedAvg", ("FedAvg",), "99.24 : 96.04"),
              (500, "SuPerFed-LM", "FedAvg", ("FedAvg",), "98.83 : 96.04"),
              (100, "SuPerFed-MM", "all rivals run here", PERSONAL, "99.38 : 99.19"),
              (100, "SuPerFed-LM", "all rivals run here", PERSONAL, "99.31 : 99.19"),
              (100, "SuPerFed-MM", "FedAvg", ("FedAvg",), "99.38 : 89.78"),
              (100, "SuPerFed-LM", "FedAvg", ("FedAvg",), "99.31 : 89.78"),
              (50, "SuPerFed-LM", "all rivals run here", PERSONAL, "99.48 : 99.40"),
              (50, "SuPerFed-MM", "all rivals run here", PERSONAL, "99.45 : 99.40"),
              (50, "SuPerFed-LM", "FedAvg", ("FedAvg",), "99.48 : 95.69"))),
        *claims("table 2.3", "500 clients: {} is ahead of {}", "runs > 500 > {} > * > validation > mean > -1",
                ("APFL", "FedAvg", "98.98 : 96.04"), ("APFL", "FedPer", "98.98 : 98.67"),
                ("APFL", "Ditto", "98.98 : 97.20"), ("FedPer", "FedAvg", "98.67 : 96.04"),
                ("FedRep", "Ditto", "97.94 : 97.20"), ("FedAvg", "pFedMe", "96.04 : 81.96"), scripts=True, looks=2,
                **PERCENT),
        *claims("table 2.3", "100 clients: {} is ahead of {}", "runs > 100 > {} > * > validation > mean > -1",
                ("FedPer", "FedAvg", "99.14 : 89.78"), ("FedRep", "FedAvg", "99.04 : 89.78"),
                ("APFL", "FedAvg", "99.19 : 89.78"), ("APFL", "FedPer", "99.19 : 99.14"),
                ("APFL", "Ditto", "99.19 : 97.13"), ("FedRep", "Ditto", "99.04 : 97.13"),
                ("FedAvg", "pFedMe", "89.78 : 82.48"), scripts=True, **PERCENT),
        *claims("table 2.3", "500 clients: {}, λ = .5, is ahead of {}", "runs > 500 > {} > * > validation > mean > -1",
                ("SuPerFed-MM", PERSONAL, "99.24 : 98.98"), differs="λ .5, not the best on test images", looks=2,
                **PERCENT),
    ], "Here every client of every method holds out a tenth of its training images for choosing λ, which the paper "
       "does not mention. With 500 clients, seeds 3 and 4 were added because the first three did not "
       "decide the first claim. That each client takes its own best λ is how the authors' code evaluates; the thesis "
       "states no rule for this table, and speaks of the best averaged accuracy elsewhere. With one λ for all clients "
       "(figure 2.5, three seeds, those whose local model was trained) SuPerFed-MM is not ahead of FedPer: "
       "-.18 ± .11."),
    "superfed/longer/table_2_3": Result("SuPerFed's rivals on MNIST (Hahn)", "150 of 500 rounds", [
        *claims("table 2.3", "100 clients: {} is more accurate than {}", "runs > 100 > {} > * > validation > mean > -1",
                ("APFL", "FedAvg", "99.19 : 89.78"), ("APFL", "FedPer", "99.19 : 99.14"), **PERCENT),
    ]),
    "superfed/tables_2_4_2_5_reduced": Result("SuPerFed on CIFAR-100 and Shakespeare (Hahn)", "", [
        *(Claim("table 2.4", f"CIFAR-100, Dirichlet 1: {method}, λ by test images as published, is ahead of {says}",
                f"{CIFAR100} > {method} > * > top5 > as published > mean > -1",
                tuple(f"{CIFAR100} > {name} > * > top5 > validation > mean > -1" for name in rivals), published,
                differs="ResNet-10 of 8 to 64 channels, 100 of 500 rounds", on_test=True, **PERCENT)
          for method, says, rivals, published in (
              ("SuPerFed-LM", "all rivals run here", CIFAR100_RIVALS, "62.50 : 61.13"),
              ("SuPerFed-LM", "FedAvg", ("FedAvg",), "62.50 : 58.12"),
              ("SuPerFed-MM", "FedAvg", ("FedAvg",), "60.14 : 58.12"))),
        *claims("table 2.4", "CIFAR-100, Dirichlet 1: {} is ahead of {}",
                CIFAR100 + " > {} > * > top5 > validation > mean > -1",
                ("APFL", "FedAvg", "61.13 : 58.12"), ("Ditto", "FedAvg", "60.04 : 58.12"),
                ("FedAvg", "FedPer", "58.12 : 46.78"), ("FedAvg", "SCAFFOLD", "58.12 : 51.16"),
                ("FedAvg", "LG-FedAvg", "58.12 : 28.88"), ("FedAvg", "FedRep", "58.12 : 38.49"),
                differs="ResNet-10 of 8 to 64 channels, 100 of 500 rounds", **PERCENT),
        *(Claim("table 2.5", f"Shakespeare, {top}: SuPerFed-MM, λ by test data as published, is ahead of all rivals",
                f"{SHAKESPEARE} > SuPerFed-MM > * > {top} > as published > mean > -1",
                tuple(f"{SHAKESPEARE} > {name} > * > {top} > validation > mean > -1" for name in BRIEF), published,
                differs="40 of 660 roles, 30 of 500 rounds", on_test=True, **PERCENT)
          for top, published in (("accuracy", "54.52 : 54.08"), ("top5", "84.27 : 83.32"))),
    ]),
    "superfed/table_2_6": Result("SuPerFed under label noise (Hahn)", "60 (pair) and 12 (symmetric) of 500 rounds", [
        *(Claim("table 2.6", f"{noise}: {method}, λ by test images as published, {says} all rivals run here",
                f"runs > {noise} > {method} > * > {what} > as published",
                tuple(f"runs > {noise} > {name} > * > {what} > mean" for name in rivals), published, on_test=True,
                **unit)
          for noise, rivals, rows in (
              ("pair .4", NOISY, (("SuPerFed-LM", "46.82 : 44.92"), ("SuPerFed-MM", ".28 : .38"))),
              ("symmetric .6", BRIEF, (("SuPerFed-MM", "56.07 : 52.41"), ("SuPerFed-MM", ".30 : .40"))))
          for (method, published), (what, says, unit) in zip(rows, (
              ("accuracy", "is more accurate than", PERCENT),
              ("ece", "has a lower ECE than", {"lower": True, "digits": 3})), strict=True)),
    ]),
    "superfed/table_2_7_reduced": Result("SuPerFed's settings (Hahn)", "MNIST instead of CIFAR-10", [
        *claims("table 2.7", "MM: L/T = {} is more accurate than {}", "starts > SuPerFed-MM > {} > * > late",
                ("0.4", "0", "92.69 : 89.87"), differs="100 of 200 rounds", **BEST),
        *claims("table 2.7", "LM: L/T = {} is more accurate than {}", "starts > SuPerFed-LM > {} > * > late",
                ("0.4", "0", "92.69 : 91.55"), differs="100 of 200 rounds", **BEST),
        *claims("figure 2.3", "MM: ν = {} is more accurate than {}", "grid > SuPerFed-MM > {} 0.01 > * > own",
                ("2", "0", "-"), **BEST),
    ]),
    **{file: Result(f"Accuracy against λ{words} (Hahn)", "", [
        claim for name in ("SuPerFed-MM", "SuPerFed-LM") for claim in (
            *claims("figure 2.5", "The accuracy of {} varies less with λ than that of {}", "runs > {} > *",
                    (name, "APFL", "-"), lower=True, measure=lambda run, _: max(run["mean"]) - min(run["mean"]),
                    scripts=bool(words), **PERCENT),
            Claim("figure 2.3", f"{name}: λ = .5 is more accurate than both ends", f"runs > {name} > * > mean > 5",
                  (f"runs > {name} > * > mean > 0", f"runs > {name} > * > mean > 10"), scripts=bool(words),
                  differs="MNIST instead of CIFAR-10", entry=lambda at: f"λ = {at / 10:g}", **PERCENT))
    ] + [
        Claim("figure 2.5", f"APFL: λ = .{at} is more accurate than λ = .5 and both ends (published: best near .25)",
              f"runs > APFL > * > mean > {at}", tuple(f"runs > APFL > * > mean > {other}" for other in (0, 5, 10)),
              scripts=bool(words), entry=lambda at: f"λ = {at / 10:g}", **PERCENT)
        for at in (2, 3)
    ])
       for file, words in (("superfed/figure_2_5", ""), ("superfed/figure_2_5_scripts", ", the scripts' settings"))},
    "superfed/as_coded": Result("SuPerFed-MM as coded (Hahn)", "1000 images, 20 clients, 12 of 500 rounds", [
        *claims("table 2.3", "{} is more accurate than {}", "runs > {} > * > accuracy",
                ("SuPerFed-MM, as coded", "SuPerFed-MM", "-"), **PERCENT),
    ], "As coded: a pull by the norm of each tensor instead of half the squared norm."),
    "superfed/landscape": Result("The loss around the server's model (Hahn)", "", [
        *claims("figure 2.4", "Towards clients' models the loss rises by .1 farther away with {} than with {}",
                "runs > {} > *", ("SuPerFed-MM", "FedAvg", "-"), ("SuPerFed-LM", "SuPerFed-MM", "-"),
                measure=lambda run, _: min(run["reach"]), digits=2),
        *claims("figure 2.4", "In random directions the loss rises by .1 farther away with {} than with {}",
                "runs > {} > *", ("SuPerFed-MM", "FedAvg", "-"), ("SuPerFed-LM", "SuPerFed-MM", "-"),
                differs="the figure shows planes through models", measure=lambda run, _: fmean(run["random_reach"]),
                digits=2),
    ]),
    "fair/silo": Result("Fair methods across silos: Heart (Hahn)", "", [
        *claims("table 3.10", "Heart: {} has a higher worst AUROC than {}",
                "data > heart_published > runs > {} > * > worst10", ("AAggFF", "FedAvg", "66.56 : 65.22"), looks=2,
                **PERCENT),
        *claims("table 3.10", "Heart: {} has a higher AUROC, weighted by samples, than {}",
                "data > heart_published > runs > {} > * > weighted", ("AAggFF", "FedAvg", "85.04 : 84.42"), looks=2,
                **PERCENT),
    ], RESPLITS),
    "fair/as_coded": Result("AAggFF-S as coded: Heart (Hahn)", "", [
        claim for words, of, published in (
            ("Heart: {} has a higher worst AUROC than {}", "worst10", "66.56 : 65.22"),
            ("Heart: {} has a higher AUROC, weighted by samples, than {}", "weighted", "85.04 : 84.42"))
        for claim in (
            *claims("table 3.10", words, f"runs > {{}} > * > {of}", ("AAggFF, as coded", "FedAvg", published),
                    scripts=True, looks=2, **PERCENT),
            *claims("table 3.10", words, f"runs > {{}} > * > {of}", ("AAggFF, as coded", "AAggFF", "-"),
                    differs="the thesis has no figures of its equations", looks=2, **PERCENT))
    ], "As coded: p starts at 1, αI is inside the Hessian, the cross term is left out. " + RESPLITS),
    "fair/device": Result("Fair methods across devices (Hahn)", "MNIST by writer and Fashion-MNIST", [
        claim for data in ("mnist_writers", "fashion_dirichlet") for claim in (
            *claims("table 3.7", data + ": {} has a higher worst 10 % than {}",
                    f"data > {data} > runs > {{}} > * > worst10", ("AAggFF", "FedAvg", "56.71 : 55.76 (CelebA)"),
                    ("AAggFF", DEVICES, "14.54 : 11.19 (SpeechCommands)"), looks=2, **PERCENT),
            *claims("table 3.7", data + ": {} has a lower Gini coefficient than {}",
                    f"data > {data} > runs > {{}} > * > gini", ("AAggFF", "FedAvg", "7.54 : 7.86 (CelebA)"),
                    lower=True, looks=2, **PERCENT),
            *claims("table 3.9", data + ": {} has a smaller gap ΔAG than {}", f"data > {data} > runs > {{}} > *",
                    ("AAggFF", "FedAvg", "43.29 : 44.25 (CelebA)"),
                    ("AAggFF", DEVICES, "85.46 : 88.81 (SpeechCommands)"),
                    measure=lambda run, _: run["best10"] - run["worst10"], lower=True, looks=2, **PERCENT))
    ], "The published ΔAG are the best 10 % of table 3.7 less its worst 10 %, and so are ours. All best 10 % are at "
       "100 %, so that the rows of ΔAG repeat those of the worst 10 %."),
    "fair/plug_and_play": Result("AAggFF in other algorithms (Hahn)", "", [
        claim for data, words, differs, rows in (
            ("heart_published", "Heart: {} {{}} AAggFF has a higher worst AUROC than {{}}", {},
             (("FedProx, as published", "66.67 : 65.44"), ("FedAdam", "67.00 : 65.44"),
              ("FedYogi", "67.00 : 65.67"), ("FedAdagrad", "66.67 : 65.67"))),
            ("fashion_dirichlet", "fashion_dirichlet: {} {{}} AAggFF has a higher worst 10 % than {{}}",
             {"FedAvg": OTHER_IMAGES, "FedAdam": OTHER_IMAGES},
             (("FedAvg", "51.50 : 50.95 (TinyImageNet)"), ("FedAdam", "55.92 : 53.54 (TinyImageNet)"))))
        for name, published in rows
        for claim in claims("table 3.10", words.format(name.partition(",")[0]),
                            f"data > {data} > runs > {name} > {{}} > * > worst10",
                            ("with", "alone", published), differs=differs.get(name, ""), looks=looks(data, name),
                            **PERCENT)
    ] + [
        claim for name, published in (("FedProx, as published", "85.04 : 84.48"), ("FedAdam", "84.84 : 84.34"),
                                      ("FedYogi", "84.86 : 84.29"), ("FedAdagrad", "85.09 : 84.61"))
        for claim in claims("table 3.10",
                            f"Heart: {name.partition(',')[0]} {{}} AAggFF has a higher weighted AUROC than {{}}",
                            f"data > heart_published > runs > {name} > {{}} > * > weighted",
                            ("with", "alone", published), looks=looks("heart_published", name), **PERCENT)
    ], RESPLITS),
    "fair/responses": Result("Response transformations (Hahn)", "Heart and MNIST by writer, not Berka and Reddit", [
        claim for data, cdf in (("heart", "normal"), ("mnist_writers", "weibull"))
        for claim in claims("figure 3.1", data + ": the {} CDF accumulates less than {}",
                            f"data > {data} > runs > {{}} > *",
                            (cdf, tuple(other for other in CDFS if other != cdf), "-"), lower=True, digits=2,
                            measure=lambda run, _: run["objective"])
    ]),
    **{file: Result(f"Synthetic data: {data} (Hahn)", differs, [
        *(claim for alpha, rows, fid in columns for claim in (
            *claims("table 4.2", f"α {alpha}: {{}} yields a better classifier than {{}}",
                    f"cells > {data} 10 {alpha} > runs > {{}} > * > equal", *rows, **IMAGES),
            *claims("table 4.4", f"α {alpha}: {{}} has a lower FID than {{}}",
                    f"cells > {data} 10 {alpha} > runs > {{}} > * > equal", ("FedEvg", GENERATORS, fid), **FID)))],
       "One of the three seeds was used to choose FedEvg's settings, and FedCVAE's rate at α .01." if data == "mnist"
       else "")
       for file, data, differs, columns in (
           ("synthesis/table_4_2_digits", "digits", "digits, small networks",
            (("1", (("FedEvg", "FedCGAN", "-"), ("FedEvg", "FedCVAE", "-")), "-"),
             ("0.01", (("FedEvg", "FedCGAN", "-"), ("FedCVAE", "FedEvg", "-")), "-"))),
           ("synthesis/table_4_2_reduced", "mnist", "small networks, 60 of 500 rounds, classes split over the clients",
            (("1", (("FedEvg", "FedCGAN", "70.94 : 60.81"), ("FedEvg", "FedCVAE", "70.94 : 64.73")), "124.72 : 181.3"),
             ("0.01", (("FedEvg", "FedCGAN", "62.95 : 44.18"), ("FedCVAE", "FedEvg", "66.93 : 62.95")),
              "171.53 : 214.35"))))},
}  # fmt: skip
