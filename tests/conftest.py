"""Where the tests run: on the GPU if there is one, else with Triton's interpreter. Nothing here may import triton first."""

import itertools
import os
from collections import Counter
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # another worker has the other cores


# The longest files first, so that all workers end at about the same time.
FIRST = (
    "test_run", "test_blocks", "test_ring", "test_copy_engine", "test_streams", "test_launch", "test_parity", "test_on_cpu",
    "test_resume",
    "test_backends", "test_ahead", "test_ring_attention", "test_faults",
)  # fmt: skip


# Sweeps: `make test` runs every n-th case of these tests (0: none), `make test-all` more. A skipped case repeats the
# property of the cases that run, over another combination of the same masks, widths, ranks, stages or completion orders. In a
# product, n has no common divisor with the number of values that vary fastest: otherwise some of them would never run.
EVERY_NTH = {
    # kernels
    "test_carry_equals_one_call": 7, "test_a_deterministic_backward_only_changes_the_order_of_sums": 16,
    "test_a_shard_gives_the_rows_of_the_whole_sequence": 29, "test_the_carry_loses_no_accuracy_in_bf16": 4,
    "test_accumulate_dq_overwrites_dk_and_dv": 3, "test_deterministic_backwards_are_bit_equal": 3,
    "test_every_case_equals_the_dense_truth": 7, "test_sweep_of_cases_in_16_bits": 7, "test_scores_of_any_size": 6,
    "test_longer_cases_in_random_orders": 23, "test_all_tuner_candidates_are_correct": 0, "test_opcheck": 4,
    "test_turns_make_dq_independent_of_order": 0, "test_masks_with_head_dims_in_chunks": 5,
    "test_gradcheck": 0, "test_benchmark_completes_on_a_cpu": 0,
    "test_wrong_chunks_are_found": 7, "test_carry_with_head_dims_in_chunks": 5, "test_sweep": 3,
    "test_cache_keys_do_not_depend_on_the_order_of_compiling": 0, "test_segments_of_different_steps": 3,
    "test_a_block_without_visible_keys_changes_nothing": 3, "test_fence_after_arrival_is_too_late": 0,
    "test_a_checkout_compared_with_itself": 0, "test_nothing_after_the_last_row_counts": 4,
    "test_equals_dense_attention_of_each_document": 5, "test_launches_do_not_depend_on_the_number_of_documents": 2,
    "test_a_forward_with_gradients_compiles_its_backward_in_a_thread": 2, "test_a_kernel_is_within_the_limits_of_the_chip": 7,
    "test_equals_attention": 3,
    # parallel
    "test_properties_hold_in_any_order": 11, "test_properties_hold_over_calls_of_different_shapes": 5,
    "test_a_fault_violates_a_property": 7, "test_a_cuda_graph_may_run_one_branch_at_a_time": 3,
    "test_equals_the_reference": 5, "test_overlapped_ring_equals_the_ring": 5,
    "test_results_do_not_depend_on_the_order_of_streams": 8, "test_plans_move_each_visible_key_once": 7,
    "test_hopper_kernels_are_as_accurate_in_a_ring": 7, "test_a_rank_that_stalls_before_an_exchange_is_named": 3,
    "test_a_deterministic_ring_of_hopper_kernels_is_bit_equal": 0, "test_benchmark_completes_on_two_ranks": 2,
    "test_no_thread_of_gloo_is_left_when_python_exits": 0, "test_a_stuck_gpu_is_reported_and_ends_the_process": 0,
    "test_a_missing_rank_is_named": 3, "test_ring_equals_one_rank": 0,
    # examples, compat
    "test_snippets_of_several_ranks_run": 5, "test_transformers_trainer_on_a_ring": 0,
    "test_every_function_equals_dense_attention": 2, "test_a_compiled_model_equals_an_eager_one": 0,
    "test_gradients_of_a_sharded_model_are_exact": 6, "test_ten_steps_equal_those_of_deepspeeds_own_classes": 0,
    "test_a_model_with_the_ring_equals_the_model_without": 0, "test_attention_equals_sdpa": 0,
    "test_fsdp2_on_a_ring": 0, "test_the_patch_is_small_and_puts_the_script_onto_two_ranks": 0,
    "test_a_ring_of_ulysses_groups_equals_deepspeeds_own_classes": 0,
    # trainer and launch
    "test_one_forward_scores_as_greedy_decoding_does": 2,
    "test_distant_facts_are_recalled_only_through_the_ring": 0, "test_fifty_steps_of_six_splits": 0,
    "test_one_step_is_equal_under_every_split": 0, "test_resumed_run_equals_an_uninterrupted_one_bit_for_bit": 4,
    "test_checkpoint_of_four_ranks_resumes_on_one_two_and_eight": 0,
    "test_bf16_run_resumes_from_its_fp32_master_weights_bit_for_bit": 4,
    "test_a_running_job_listens_on_loopback_only_and_names_a_killed_rank": 0, "test_peak_grows_with_length_as_planned": 8,
    "test_memory_plans_change_no_number": 3, "test_gradients_equal_those_of_the_plain_step": 2,
    "test_random_words_replace_parts_of_training_templates_only": 3, "test_warm_up_changes_no_number": 3,
    "test_a_rank_whose_loss_is_not_finite_is_named_and_the_run_goes_on": 0,
    "test_no_rank_outlives_its_supervisor": 4, "test_tests_of_eight_ranks_are_selected": 2,
    "test_each_row_is_printed_as_soon_as_it_is_known": 0, "test_a_resume_from_a_cold_start": 0,
    "test_signal_to_one_rank_saves_and_stops_all": 0,
    "test_signal_is_handled_in_every_phase": 4, "test_steps_with_a_non_finite_gradient_on_one_rank_are_skipped_and_counted": 2,
    "test_finished_run_that_trains_again_and_is_killed_is_not_finished": 2, "test_checkpoints_of_a_compiled_layer": 0,
    "test_texts_of_a_batch_equal_texts_generated_alone": 3, "test_wandb_sync_uploads_an_offline_run": 0,
    "test_wandb_without_a_network_continues_offline": 0, "test_a_sweep_trains_every_job": 0,
    "test_repeated_sweep_runs_only_unfinished_jobs": 0, "test_profile_of_a_step_has_the_rings_operators": 0,
    "test_a_long_step_is_abandoned_and_the_last_completed_one_saved": 10, "test_a_run_does_not_need_its_console": 3,
    "test_torchrun_opens_the_ports_of_its_warning_and_leaves_no_orphan": 0,
    "test_random_kills_leave_no_process_and_change_no_number": 0,
    "test_a_rank_that_dies_is_named_and_the_run_goes_on": 0, "test_a_stalled_rank_is_named": 0,
    "test_ranks_that_read_different_files_do_not_start": 2, "test_without_the_hash_data_ranks_train_on": 0,
    "test_a_ring_that_reads_different_samples_stops_and_saves_the_step_before": 2, "test_resumes_across_splits": 0,
    "test_without_the_checksum_of_samples_a_ring_trains_on": 0, "test_without_the_comparison_a_changed_file_trains_on": 0,
    "test_a_shard_that_changes_under_a_run_is_one_message": 2, "test_a_mutated_manifest_never_ends_a_start": 4,
    "test_unreadable_data_is_one_message_and_exit_code_2": 2, "test_types_reach_users_and_checks_reach_the_folders": 0,
    "test_kept_bytes_of_a_compiled_layer": 0, "test_training_equals_that_of_the_plan_none": 3,
    "test_gradients_equal_those_of_one_rank": 2, "test_death_at_every_operation_of_a_save_leaves_a_whole_checkpoint": 2,
    "test_a_second_warmup_finds_all_kernels_in_the_cache": 0, "test_a_full_cache_is_faster_than_an_empty_one": 0,
}  # fmt: skip


# Products of parameters, with the number of parameters of which `make test-all` runs all combinations of values: pairs, or each
# value once. `make test-products` runs the other cases.
PRODUCTS = {
    "test_a_shard_gives_the_rows_of_the_whole_sequence": 2, "test_every_case_equals_the_dense_truth": 2,
    "test_scores_of_any_size": 2, "test_wrong_chunks_are_found": 2, "test_properties_hold_in_any_order": 2,
    "test_plans_move_each_visible_key_once": 2, "test_equals_the_reference": 2,
    "test_gradients_of_every_model_plan_and_split": 2, "test_nothing_after_the_last_row_counts": 2,
    "test_equals_attention": 2, "test_longer_cases_in_random_orders": 1, "test_sweep": 1,
    "test_equals_dense_attention_of_each_document": 1,
}  # fmt: skip


def cover(cases: list[dict[str, str]], chosen: set[int], size: int) -> set[int]:
    """Return indices of cases, those chosen before among them, that together have each combination of `size` values."""
    combinations = [set(itertools.combinations(sorted(case.items()), size)) for case in cases]
    missing = set[tuple[tuple[str, str], ...]]().union(*combinations).difference(*(combinations[index] for index in chosen))
    while missing:
        best = max(range(len(cases)), key=lambda index: len(combinations[index] & missing))
        missing -= combinations[best]
        chosen = chosen | {best}
    return chosen


def mark_products(items: list[pytest.Item]) -> None:
    """Mark the cases of products that `make test-all` leaves out."""
    products: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        name = item.name.partition("[")[0]
        if name in PRODUCTS and "gpu" not in item.keywords:
            products.setdefault((item.path.stem, name), []).append(item)
    for (_, name), product in products.items():
        cases = [{key: repr(value) for key, value in item.callspec.params.items()} for item in product]
        in_test = {i for i, item in enumerate(product) if "exhaustive" not in item.keywords}
        for index in set(range(len(product))) - cover(cases, in_test, PRODUCTS[name]):
            product[index].add_marker(pytest.mark.product)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, of which each worker takes the next; mark the rest of a sweep; skip GPU tests without a GPU."""
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))
    counts: Counter[tuple[str, str]] = Counter()
    for item in items:
        name = item.name.partition("[")[0]
        if name in EVERY_NTH and "gpu" not in item.keywords:
            nth, number = EVERY_NTH[name], counts[item.path.stem, name]
            counts[item.path.stem, name] += 1
            if nth == 0 or number % nth:
                item.add_marker(pytest.mark.exhaustive)
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    mark_products(items)


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory():
    """Fill new tensors with NaN, so that a row that is never written fails the test."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
