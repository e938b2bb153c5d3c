"""What people ask for: each row of the page has its verdict and a test, or a page, that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedloom.base.errors import ConfigError
from fedloom.core.targets import TRUTHS
from fedloom.experiment.evaluation import Evaluation

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/asked.md"
VERDICTS = ("works", "otherwise", "refused", "not done")
EVIDENCE = {
    1: "data/test_untrusted_files.py::test_items_of_three_fields_are_refused_with_their_fields",
    2: "core/test_rates_and_batches.py::test_a_last_batch_of_one_does_not_cost_the_client_with_batch_normalisation",
    3: "use/test_best_and_evaluate.py::test_the_best_round_is_kept_with_its_clients",
    4: "metrics/test_validation.py::test_a_run_stops_and_selects_by_validation_samples",
    5: "cli/test_warm_start_and_changes.py::test_a_run_starts_from_a_file_or_from_a_run",
    6: "core/test_single_clients.py::test_clients_join_and_leave_with_their_states",
    7: "cli/test_warm_start_and_changes.py::test_data_may_have_a_seed_of_their_own",
    8: "cli/test_console.py::test_what_privacy_costs_is_in_lines_bars_and_tables",
    9: "core/test_rates_and_batches.py::test_fractions_of_epochs_are_their_first_batches",
    10: "cli/test_warm_start_and_changes.py::test_a_continued_run_may_change_local_training",
    11: "core/test_single_clients.py::test_settings_and_presence_of_clients_come_from_tables",
    12: "timing/test_selections.py::test_clients_are_included_with_their_probabilities",
    13: "timing/test_schedules.py::test_clients_are_invited_only_while_they_are_there",
    14: "data/test_collate.py::test_example",
    15: "../docs/target.md",
    16: "core/test_rates_and_batches.py::test_optimisers_are_those_of_pytorch",
    17: "use/test_best_and_evaluate.py::test_evaluation_without_training_is_that_of_the_run",
    18: "data/test_doubtful_data.py::test_classes_that_only_test_samples_have_are_named",
    19: "run/test_callbacks.py::test_a_metric_without_a_value_is_named_and_ends_no_run",
    20: "uplink/test_privacy.py::test_no_guarantee_is_recorded_as_infinite",
    21: "cli/test_using.py::test_a_run_of_a_file_is_used_from_any_folder",
    22: "data/test_table_sources.py::test_clients_of_a_table_in_time_are_tested_on_their_last_rows",
    23: "run/test_callbacks.py::test_validation_samples_that_nothing_reads_are_counted",
    24: "data/test_own_data.py::test_random_items_of_a_torch_data_set_are_noticed",
    25: "run/test_python_types.py::test_a_wrong_type_is_one_sentence",
    26: "use/test_needs.py::test_metrics_of_classes_are_refused_for_truth_values",
    27: "run/test_around_a_run.py::test_gpu_means_cuda",
    28: "run/test_callbacks.py::test_means_over_some_of_the_clients_say_over_how_many",
    29: "report/test_report_numbers.py::test_accuracy_against_lambda_and_reliability_are_what_the_last_round_recorded",
    30: "cli/test_notes.py::test_how_a_run_was_computed_is_told_to_who_asks",
    31: "cli/test_console.py::test_a_notebook_has_a_bar_without_widgets",
    32: "use/test_best_and_evaluate.py::test_rounds_and_checkpoints_are_loaded",
    33: "cli/test_applications.py::test_a_module_of_ones_own_is_imported",
    34: "test_refused_combinations.py::test_every_refusal_has_a_case",
    35: "models/test_wrap.py::test_an_instance_trains_like_the_factory_that_made_it",
    36: "data/test_own_data.py::test_every_form_gives_the_same_federation",
    37: "methods/test_tasks.py::test_class_weights_of_a_loss_module_are_pytorch_s",
    38: "metrics/test_metric_registry.py::test_a_metric_of_one_s_own",
    39: "engines/test_every_method.py::test_any_number_of_workers_agrees_with_serial",
    40: "run/test_resume.py::test_killed_again_and_again_at_random_moments",
    41: "models/test_wrap.py::test_the_wrapped_module_computes_what_it_did",
    42: "data/test_collate.py::test_inputs_of_any_structure_with_plain_targets_have_all_that_goes_by_targets",
    43: "methods/test_stragglers.py::test_what_they_have_done_enters_the_average",
    44: "data/test_unseen.py::test_training_is_as_if_unseen_clients_were_not_there",
    45: "../docs/report.md",
    46: "../docs/howto/sweep.md",
    47: "run/test_trackers.py::test_every_run_of_a_sweep_is_tracked",
}


def rows() -> dict[int, list[str]]:
    """The cells of the page's table, by number."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    return {int(cells[0]): cells[1:] for cells in lines[2:]}


def test_every_need_has_a_verdict_and_is_shown() -> None:
    assert rows().keys() == EVIDENCE.keys()
    for number, cells in rows().items():
        assert cells[-1] in VERDICTS, number
        path, _, name = EVIDENCE[number].partition("::")
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(" if name else "^# ", text, re.M), EVIDENCE[number]


def test_metrics_of_classes_are_refused_for_truth_values() -> None:
    with pytest.raises(ConfigError, match=r"'balanced_accuracy' is for classes, .* choose among accuracy, .*auroc"):
        Evaluation(metrics=("balanced_accuracy",)).for_targets(TRUTHS, common=False)
