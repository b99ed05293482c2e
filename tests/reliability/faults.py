"""The faults of docs/reliability.md, put back into the package: each as a change of its text."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| \[([^\]]+)\]\([^)]+\) \| .* \| `([^`]+)` \|$", re.MULTILINE)


class Fault(NamedTuple):
    """file: of the package. old: text that it has once. new: what takes its place."""

    file: str
    old: str
    new: str

    def text(self) -> str:
        """The file with the fault."""
        source = (ROOT / "mlxpaged" / self.file).read_text()
        assert source.count(self.old) == 1, f"{self.file} has {source.count(self.old)} times: {self.old}"
        return source.replace(self.old, self.new)


FAULTS: dict[str, Fault] = {
    "test_mlx_lm_1505_an_exception_in_a_step_leaves_no_zombie": Fault(
        "core/engine/step_loop.py", "            self._recover(scheduled, error)\n", "            raise\n"
    ),
    "test_mlx_lm_1672_an_allocation_that_fails_while_answers_run_loses_none": Fault(
        "core/engine/recovery.py", "        is_short = is_out_of_memory(error)\n", "        is_short = False\n"
    ),
    "test_mlx_lm_1909_an_exception_where_an_answer_ends_reaches_its_client": Fault(
        "core/engine/request_table.py",
        '        except Exception as error:\n            logger.exception("token',
        '        except ZeroDivisionError as error:\n            logger.exception("token',
    ),
    "test_a_stall_is_told_ends_what_waits_and_is_over_when_the_step_ends": Fault(
        "engine/engine_thread.py", "        self._stalled = activity, stall\n", "        self._stalled = None\n"
    ),
    "test_mlx_lm_1390_many_prompts_leave_the_cache_within_its_pool": Fault(
        "core/blocks/prefix_cache.py", "        del self._by_key[record.key]\n", ""
    ),
    "test_mlx_lm_1390_clients_that_leave_their_streams_leave_nothing_behind": Fault(
        "engine/async_engine.py",
        "        if request_id in self._streams:\n            self.host.send",
        "        if request_id not in self._streams:\n            self.host.send",
    ),
    "test_mlx_lm_883_a_context_beyond_the_memory_is_refused_with_both_numbers": Fault(
        "core/scheduling/admission.py", "    if blocks > num_blocks:\n", "    if blocks > 100 * num_blocks:\n"
    ),
    "test_vllm_mlx_442_memory_is_flat_over_many_requests": Fault(
        "core/engine/model_runner.py",
        "        self.model_calls += 1\n        return logits\n",
        """        self.model_calls += 1
        vars(self).setdefault('kept', []).append(logits)
        return logits
""",
    ),
    "test_omlx_947_what_does_not_fit_together_waits": Fault(
        "core/scheduling/admission.py", "        if needed > room:\n", "        if needed > room + 1000:\n"
    ),
    "test_weights_that_do_not_fit_beside_the_kv_cache_and_a_step_are_refused_with_all_numbers": Fault(
        "models/sources/preflight.py", "needed > free_bytes:\n", "sum(known) > free_bytes:\n"
    ),
    "test_vllm_mlx_384_prompts_that_part_inside_a_block_do_not_get_each_others_answers": Fault(
        "core/blocks/prefix_cache.py",
        """            found = self._by_key.get(keys[index])
            if found is None or found.parent is not parent:
                break
            if found.tokens != tuple(token_ids[index * size : (index + 1) * size]):
                break
""",
        """            first = token_ids[index * size]
            found = next((r for r in self if r.parent is parent and r.tokens[0] == first), None)
            if found is None:
                break
""",
    ),
    "test_mlx_lm_965_sixteen_concurrent_prompts_keep_their_own_answers": Fault(
        "core/engine/step_loop.py",
        "        step.set_samples(ids, samples)\n",
        "        step.set_samples(ids[::-1], samples)\n",
    ),
    "test_mlx_lm_1776_two_models_on_one_server_do_not_spoil_each_others_cache": Fault(
        "core/blocks/prefix_cache.py",
        """        self._root = hashlib.blake2b(seed, digest_size=16).digest()
        self._by_key: dict[bytes, CachedBlock] = {}
""",
        """        self._root = b""
        self._by_key = vars(hashlib).setdefault("of_all_models", {})
""",
    ),
    "test_omlx_3476_a_greedy_answer_does_not_depend_on_the_others": Fault(
        "models/states/states.py",
        "        return joined if order == members else take(joined, [order.index(i) for i in members])\n",
        "        return joined\n",
    ),
    "test_mlx_lm_983_a_short_and_a_long_prompt_run_together_on_a_sliding_model": Fault(
        "attention/gather.py",
        "        first = locality.first_key(last - length + 1)\n",
        "        first = np.full_like(last, locality.first_key(last - length + 1).max())\n",
    ),
    "test_mlx_lm_1255_retries_and_short_probes_do_not_wedge_a_sliding_model": Fault(
        "core/scheduling/scheduler.py",
        "        self.blocks.release(sequence)\n        self.blocks.states.remove(sequence)\n",
        """        if sequence.num_output_tokens:
            self.blocks.release(sequence)
        self.blocks.states.remove(sequence)
""",
    ),
    "test_mlx_lm_980_a_repeated_prompt_is_not_computed_again": Fault(
        "core/scheduling/block_manager.py",
        "        if self.prefix_cache is None or self.groups.keeps_all:\n            return len(chain)\n",
        """        if self.prefix_cache is None or self.groups.keeps_all:
            return len(chain)
        return 0
""",
    ),
    "test_lm_studio_1977_a_turn_computes_only_what_is_new": Fault(
        "core/scheduling/block_manager.py",
        "        num_tokens = min(sequence.num_computed_tokens, sequence.num_known_tokens)\n",
        "        num_tokens = min(sequence.num_computed_tokens, 32)\n",
    ),
    "test_vllm_mlx_407_requests_of_many_threads_are_computed_on_one": Fault(
        "engine/engine_thread.py",
        "            slot.outputs += core.step()\n",
        """            thread = threading.Thread(target=lambda: slot.outputs.extend(core.step()))
            thread.start()
            thread.join()
""",
    ),
    "test_vllm_mlx_800_a_prompt_that_is_cached_is_answered_as_before": Fault(
        "core/blocks/block_table.py",
        "            new = [ids[i] if i in kept else self.chain[i].blocks[group] for i in range(first, end)]\n",
        "            new = [ids[i] if i in kept else self.chain[0].blocks[group] for i in range(first, end)]\n",
    ),
    "test_vllm_mlx_799_the_temperature_reaches_the_sampler": Fault(
        "api/generation/request.py",
        "& set(type(body).model_fields)\n",
        "& set(type(body).model_fields) - {'temperature'}\n",
    ),
    "test_mlx_lm_1007_a_schema_is_kept_beside_other_requests": Fault(
        "api/openai/chat.py",
        'form = body.response_format.constraint("response_format") if body.response_format is not None else None\n',
        "form = None\n",
    ),
    "test_ollama_17183_a_form_that_cannot_be_kept_is_refused": Fault(
        "api/ollama/translation.py", "    if body.format:\n", "    if body.format == 'json':\n"
    ),
    "test_omlx_2031_long_prompts_leave_a_running_answer_its_token_of_each_step": Fault(
        "core/scheduling/scheduler.py",
        "        self._add_decodes(builder)\n        self._add_prompts(builder)\n",
        """        self._add_prompts(builder)
        if not builder:
            self._add_decodes(builder)
""",
    ),
    "test_a_client_that_leaves_the_queue_never_runs": Fault(
        "engine/async_engine.py",
        "        if request_id in self._streams:\n            self.host.send",
        "        if request_id not in self._streams:\n            self.host.send",
    ),
    "test_omlx_3047_of_waiting_requests_the_more_urgent_one_runs_first": Fault(
        "core/scheduling/scheduler.py", "(sequence.priority + AGING_RATE *", "(AGING_RATE *"
    ),
    "test_a_process_that_is_killed_leaves_no_file": Fault(
        "core/engine/swap_space.py",
        "tempfile.TemporaryFile(prefix",
        "tempfile.NamedTemporaryFile(delete=False, prefix",
    ),
    "test_an_idle_model_is_unloaded_after_a_time_and_comes_back": Fault(
        "registry/registry.py", "model.is_idle and not self.seconds_left(model):\n", "model.idle_since < 0:\n"
    ),
    "test_mlx_lm_1695_other_machines_are_not_let_in_without_a_key": Fault(
        "cli/serve.py", "if not (args.api_keys or args.insecure or", "if not (args.port == 0 or args.insecure or"
    ),
}


def threads() -> dict[str, tuple[str, str]]:
    """The table of docs/reliability.md: the thread and the test, by the test's function."""
    rows = ROW.findall((ROOT / "docs" / "reliability.md").read_text())
    return {test.rpartition("::")[2]: (thread, test) for thread, test in rows}


def run_with(fault: Fault, test: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a test with the fault, in a copy of the project that has links to its other files."""
    for name in ("tests", "metal_kernels", "pyproject.toml", "benchmarks", "docs"):
        (directory / name).symlink_to(ROOT / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        ROOT / "mlxpaged", directory / "mlxpaged", ignore=ignored, copy_function=lambda a, b: Path(b).symlink_to(a)
    )
    changed = directory / "mlxpaged" / fault.file
    changed.unlink()
    changed.write_text(fault.text())
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "--more", test]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600, check=False)
