"""My phones are slow: how long does training take on them, and what helps? Twenty phones, one in four of them old."""

import fedloom as fl

federation = fl.data.federate("digits", "dirichlet", clients=20, seed=1)
phones = fl.timing.Grades(speed=2e6, speeds=(1.0, 1.0, 1.0, 0.05), jitter=0.2)  # operations and bytes a second
goal = {"what": ("global",), "target": 0.8, "stop_at_target": True}
on = {"devices": phones, "cohort": 10, "local": {"epochs": 2, "lr": 0.1}, "evaluation": goal}

for method, schedule, rounds in (
    ("fedavg", fl.timing.Rounds(), 60),  # waits for the slowest of ten
    ("fedavg", fl.timing.OverSelect(0.5), 60),  # invites fifteen, waits for ten: old ones are rarely heard
    ("fedbuff", fl.timing.Buffered(3), 200),  # a step whenever three are done, while the others go on
):
    summary = fl.run(method, federation, "mlp", rounds=rounds, schedule=schedule, **on).summary
    seconds, steps = summary["target"]["clock"], summary["target"]["round"]
    print(f"{method:8} {type(schedule).__name__:12} {steps} steps, {seconds} seconds to 80 %")
