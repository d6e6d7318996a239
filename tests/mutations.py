"""Break one rule at a time in a copy of the package; a named test must notice each.

    python tests/mutations.py            all of them, a few minutes
    python tests/mutations.py prox sam   those whose name contains one of the words

Prints caught or MISSED for each; exits 1 when one was missed, 2 when the list itself is out of date.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES, COMPOSED = "contract/test_rules.py", "contract/test_compositions.py"
ALONE, PAIRS, REFERENCE = "contract/test_every_part.py", "contract/test_pairs.py", "contract/test_reference.py"
STRUCTURE = "contract/test_structure.py"
ALIASED = ('            elif name == "received":\n                self.received = self.model\n'
           "            elif not hasattr(self, name):\n")


@dataclass(frozen=True)
class Mutation:
    """In `file`, `old` becomes `new`, once; then `test` (of tests/) must fail. `only` picks its cases, as pytest -k does."""

    name: str
    file: str
    old: str
    new: str
    test: str
    only: str = ""


MUTATIONS = (
    # one door for forward passes
    Mutation("second pass moves buffers", "core/step.py", "update_buffers=main,", "update_buffers=True,",
             ALONE, "idle_partners and prox"),
    Mutation("train-mode pass writes buffers", "core/network.py", 'if train and model["buffers"] and not update_buffers:', "if False:",
             f"{RULES}::test_only_the_main_pass_writes_buffers"),
    Mutation("pseudo-data move the batch counter", "core/network.py", 'if train and model["buffers"] and not update_buffers:', "if False:",
             f"{RULES}::test_each_batch_is_counted_once"),
    Mutation("references run with the trained model's statistics", "core/network.py",
             "            for key, table, leaf in self._buffers:\n                table[leaf] = buffers[key]\n", "",
             f"{RULES}::test_reference_forwards_use_the_references_own_statistics"),
    Mutation("the probe's statistics leak into the initial model", "core/network.py",
             'trace = self.forward(model, x, train=True, key=', 'trace = self.forward(model, x, train=True, update_buffers=True, key=',
             f"{RULES}::test_building_leaves_no_statistics_of_the_probe"),
    # memoise
    Mutation("equal forwards computed again", "core/step.py", "        if call not in memo:\n            trace =",
             "        if True:\n            trace =", f"{RULES}::test_forwards_of_a_step"),
    Mutation("frozen models' passes forgotten between SAM's two", "core/step.py", "memo = self.memo if mine else self.step.memo",
             "memo = self.memo", f"{RULES}::test_forwards_of_a_step"),
    # ownership
    Mutation("received aliases the model", "core/slot.py", "            elif not hasattr(self, name):\n",
             ALIASED,
             f"{RULES}::test_received_model_stands_still_while_the_client_trains"),
    Mutation("received aliases the model, against a plain loop", "core/slot.py", "            elif not hasattr(self, name):\n",
             ALIASED,
             f"{REFERENCE}::test_prox_and_scaffold_together"),
    Mutation("finished state is not copied", "core/client.py", "tensors=tree.clone(after)", "tensors=after",
             ALONE, "unmutated and (moon or prbm)"),
    Mutation("a part writes in place", "parts/avgm.py", 'v = tree.add(new, s.server["v"], self.beta)',
             '[t.mul_(self.beta) for t in s.server["v"].values()]\n        v = tree.add(new, s.server["v"])', ALONE, "unmutated and avgm"),
    Mutation("unused parameters get no gradient", "core/gradients.py", "torch.zeros_like(params[k]) if whole is None else whole", "whole",
             f"{RULES}::test_unused_parameters_get_zero_gradients"),
    # phases
    Mutation("frozen keys left in the phase", "parts/babu.py",
             "return [replace(main, keys=tuple(k for k in main.keys if not spec.in_head(k))), *others]", "return phases",
             f"{COMPOSED}::test_frozen_means_frozen"),
    Mutation("frozen keys get a zero gradient", "core/step.py",
             "        return Gradients.of(leaves, dict(zip(leaves, grads)), arrived)",
             "        still = {} if self.program.policy.momentum else dict.fromkeys(params)\n"
             "        return Gradients.of(params, {**still, **dict(zip(leaves, grads))}, arrived)",
             f"{COMPOSED}::test_frozen_means_frozen"),
    Mutation("one path length for all keys", "core/client.py",
             "            if phase.model == \"model\":\n                for k in phase.keys:",
             "            if phase.model == \"model\":\n                for k in self.fed.spec.model['params']:",
             f"{COMPOSED}::test_fedrep_and_scaffold_correct_and_measure_the_base_alone"),
    Mutation("task hooks act on one model only", "core/method.py", "{h: self.using(h) for h in TASK_HOOKS}",
             "{h: self.using(h, phase.model) for h in TASK_HOOKS}", f"{COMPOSED}::test_what_defines_the_task_acts_on_ditto_too"),
    Mutation("step hooks act on every model", "core/method.py", "{h: self.using(h, phase.model) for h in STEP_HOOKS}",
             "{h: self.using(h) for h in STEP_HOOKS}", f"{COMPOSED}::test_what_defines_the_task_acts_on_ditto_too"),
    Mutation("adversaries and statistics in phases that upload nothing", "core/method.py", "return active if uploads else active |",
             "return active if True else active |",
             f"{COMPOSED}::test_fedrep_and_fedbr_step_their_adversary_in_the_base_phase_only"),
    # gradient before grad
    Mutation("corrections bend SAM's shift", "core/step.py", "            given = part.gradient(view, step.grad_at)\n",
             "            def corrected(params):\n                g = step.grad_at(params)\n"
             "                return step.correct(g)\n"
             "            given = part.gradient(view, corrected)\n",
             f"{COMPOSED}::test_sam_wraps_the_objective_and_corrections_come_after"),
    # declared corrections
    Mutation("pulls on what the phase does not train", "core/correction.py", "[k for k in keys if k in flat]", "flat",
             "parts/test_correction.py::test_what_the_phase_does_not_train_stays_and_is_not_in_the_loss"),
    Mutation("a pull past autograd is in no loss", "core/step.py", "self.result[0] + term, self.result[1]", "self.result",
             "parts/test_correction.py::test_two_steps_by_hand", "cpu and steady"),
    Mutation("statistics from the last pass", "core/step.py", "        if main:\n            self.result = loss.detach()",
             "        if True:\n            self.result = loss.detach()",
             f"{COMPOSED}::test_statistics_come_from_the_first_of_sams_passes"),
    # adversaries
    Mutation("adversaries step in both passes", "core/step.py",
             '        if main:\n            for part, view in self.views("adversary")',
             '        if True:\n            for part, view in self.views("adversary")', ALONE, "idle_partners and (debias or dann)"),
    Mutation("nobody steps before the forward pass", "core/step.py",
             'for part, view in self.views("before"):\n                step.program', 'for part, view in ():\n                step.program',
             f"{RULES}::test_adversaries_step_once_before_or_after_the_forward"),
    Mutation("the min step moves FedBR's projection", "core/assemble.py", "if not method.trained_apart(k) and", "if True and",
             "parts/test_debias.py::test_both_steps_equal_the_reference"),
    Mutation("FedBR's max step goes downhill", "parts/debias.py", "train=True), -1.0)", "train=True), 1.0)",
             "parts/test_debias.py::test_both_steps_equal_the_reference"),
    Mutation("own steps have no momentum", "core/optimiser.py", 'replace(policy, optimiser="sgd", weight_decay=0.0)',
             'replace(policy, optimiser="sgd", weight_decay=0.0, momentum=0.0)', "core/test_apart.py::test_steps_up_with_momentum_by_hand"),
    Mutation("own steps have weight decay", "core/optimiser.py", 'replace(policy, optimiser="sgd", weight_decay=0.0)',
             'replace(policy, optimiser="sgd")', "core/test_apart.py::test_steps_up_with_momentum_by_hand"),
    # taps
    Mutation("a point may fire twice", "core/network.py", "        if point in trace.before:\n", "        if False:\n",
             f"{RULES}::test_a_point_must_fire_exactly_once"),
    Mutation("a point may never fire", "core/network.py", "        if missing:\n", "        if False:\n",
             f"{RULES}::test_a_point_must_fire_exactly_once"),
    Mutation("every module is listened to", "core/network.py",
             "        self._ears = [",
             "        self.points = (*{*self.points, *(n for n, _ in module.named_children())},)\n        self._ears = [",
             f"{RULES}::test_only_asked_points_are_listened_to"),
    Mutation("passes share their noise", "core/step_view.py", "rng.key(self._pass.step.key, self._label, self._part.name, *words)",
             "rng.key(self._pass.step.key, self._part.name, *words)", f"{RULES}::test_two_passes_do_not_share_noise"),
    Mutation("evaluation differs from cosines over τ", "parts/cosine.py", "F.normalize(self.weight)) / self.tau",
             "F.normalize(self.weight)) / self.tau - 0.15 * (not self.training)",
             "parts/test_cosine.py::test_served_model_scores_cosines_without_margin"),
    # zero steps
    Mutation("a client without a step has weight", "core/round.py", "active = [i for i in cohort if i not in idle and",
             "active = [i for i in cohort if", f"{REFERENCE}::test_a_client_without_a_step_keeps_its_state_and_has_no_weight"),
    # SCAFFOLD's divisor
    Mutation("path length without momentum", "core/policy.py", "return lr * (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)",
             "return lr * steps", f"{REFERENCE}::test_prox_and_scaffold_together"),
    Mutation("kept momentum is accepted", "parts/_reasons.py", 'if spec.policy.optimiser_state == "kept" and spec.policy.momentum:',
             "if False:", f"{RULES}::test_path_lengths_need_an_optimiser_that_starts_anew"),
    # BatchNorm
    Mutation("a global model without statistics is scored", "core/federation.py",
             '        if any(k not in self.spec.shared for k in self.spec.norm if k in self.model["buffers"]):\n', "        if False:\n",
             f"{RULES}::test_a_global_model_without_statistics_is_not_scored"),
    Mutation("FedBN sends scales", "parts/bn.py", "return key not in spec.norm",
             'return key not in spec.norm or key in spec.model["params"]', f"{COMPOSED}::test_fedbn_is_the_policy_local"),
    Mutation("running statistics overshoot their average", "core/aggregate.py",
             '"buffers": {**fed.model["buffers"], **{k: b + moved[k] for k, b in floats.items()}',
             '"buffers": {**fed.model["buffers"], **{k: b + 1.9 * moved[k] for k, b in floats.items()}',
             f"{REFERENCE}::test_fedavg_with_momentum_decay_and_batchnorm"),
    # building, presets, policies, declared state
    Mutation("initial values depend on the stack", "core/assemble.py", 'rng.key(policy.seed, "build", part.name)',
             'rng.key(policy.seed, "build", len(method.parts))', f"{RULES}::test_initial_values_depend_on_the_parts_own_name"),
    Mutation("a preset forwards to the wrong option", "parts/presets.py", '"kappa": ("mr.kappa",)', '"kappa": ("mr.momentum",)',
             f"{RULES}::test_presets_forward_their_options"),
    Mutation("policies in conflict are accepted", "core/method.py", "if len(values) > 1:", "if False:",
             f"{RULES}::test_parts_that_prefer_different_policies_are_refused"),
    Mutation("undeclared state is accepted", "core/federation.py",
             "returned.check_state(part, hook, new, declared.get(part.name, {}), home)", "pass",
             f"{RULES}::test_state_and_uploads_must_be_declared"),
    Mutation("state may change its type, and its checkpoints cannot be read", "core/returned.py",
             "(types and t.dtype != expected[path].dtype) or", "",
             "core/test_returned.py::test_a_wrong_form_is_refused_and_nothing_of_the_round_stays"),
    Mutation("a refusal is lost", "parts/ntd.py", '{"soft labels": "needs the one true class of every sample"}', "{}",
             f"{PAIRS}::test_refusals_are_the_known_ones_and_say_why"),
    # in a step, not
    Mutation("a branch on the first participation", "parts/moon.py", "return self.mu * torch.where(v.first, 0.0, F.softplus(",
             "return self.mu * (0.0 if v.first else F.softplus(", ALONE, "capturable and moon"),
    Mutation("one_hot in a step", "core/task.py", "    return (target.unsqueeze(1) == numbers).to(dtype)",
             "    import torch.nn.functional as nf\n    return nf.one_hot(target, classes).movedim(-1, 1).to(dtype)",
             ALONE, "capturable and mixup"),
    Mutation("a boolean mask in a step", "parts/anchors.py", "        if self.mode == \"guide\":\n",
             "        h = h + 0 * h[weight[v.batch.y] > 0].sum()\n        if self.mode == \"guide\":\n", ALONE, "capturable and anchors"),
    Mutation("a step's draws are captured", "core/step.py", "return rng.fold(self.slot.key, self.slot.counter[0])",
             "import random; return rng.fold(self.slot.key, random.getrandbits(30))", ALONE, "capturable and ffa"),
    Mutation("the learning rate is captured", "core/step.py",
             "optimiser.update(self.policy, params, g, slot.optimiser[step.phase.name], slot.lr)",
             "optimiser.update(self.policy, params, g, slot.optimiser[step.phase.name], torch.tensor(self.policy.lr_at(int(slot.round))))",
             f"{RULES}::test_learning_rate_lives_on_the_device"),
    Mutation("the schedule does not reach the step", "core/step.py",
             "optimiser.update(self.policy, params, g, slot.optimiser[step.phase.name], slot.lr)",
             "optimiser.update(self.policy, params, g, slot.optimiser[step.phase.name], torch.tensor(self.policy.lr))",
             f"{RULES}::test_learning_rate_lives_on_the_device"),
    # bfloat16, as far as a CPU shows it; what the kernels do is for `make test-kernels`
    Mutation("a kernel cut for another map", "layers/bfloat16.py",
             '            if seen.reach != cut:\n                return {}, seen.reach\n', "",
             "layers/test_bfloat16.py::test_maps_of_another_size_have_the_whole_kernel"),
    Mutation("a cut kernel's gradient is lost", "layers/bfloat16.py", "            a.reach.of(out[-1]).copy_(a.grad)", "            pass",
             "layers/test_bfloat16.py::test_kernels_larger_than_their_maps_are_cut"),
    Mutation("pooling: of equal numbers the last counts", "layers/pooling.py", "(b > a).long()", "(b >= a).long()",
             "layers/test_pooling.py::test_by_hand_the_first_of_equal_numbers_counts"),
    Mutation("pooling: places of a map without its last column", "layers/pooling.py", "[:, None] * width", "[:, None] * 2 * w",
             "layers/test_pooling.py::test_the_way_back_from_slices"),
    Mutation("the commit is asked for again at the end of a run", "runs/environment.py", "@cache\n", "",
             "runs/test_run.py::test_the_commit_recorded_is_that_of_the_start"),
    Mutation("a folded kernel that begins in the midst of a square", "layers/folding.py", "    front = padding % STRIDE ", "    front = 0 ",
             "layers/test_folding.py::test_maps_and_all_gradients_are_the_convolutions"),
    # frozen models are asked once a round
    Mutation("answers of the first step's samples in every step", "core/step.py",
             "slot.places.index_select(0, slot.counter)[0]", "slot.places[0]",
             "core/test_recall.py::test_every_answer_is_what_a_pass_over_the_batch_shows"),
    Mutation("rows of a whole batch for a piece of it", "core/step.py", "if name is None or x is not self.drawn:", "if name is None:",
             "core/test_recall.py::test_pieces_of_a_batch_are_asked_for_themselves"),
    Mutation("augmented samples are taken for the drawn ones", "core/recall.py",
             "changes = (fed.program.random_transform or ", "changes = (",
             "core/test_recall.py::test_elsewhere_models_are_asked_in_every_step"),
    # order and draws
    Mutation("parts are not sorted", "core/method.py", "tuple(sorted(parts, key=lambda p: (p.rank, p.name)))", "tuple(parts)",
             PAIRS, "larger_stacks"),
    Mutation("sums follow the order of training", "core/round.py", "    ids = sorted(active)\n", "    ids = list(active)\n",
             ALONE, "order and (scaffold or prox or anchors)"),
    Mutation("momentum survives the round", "core/client.py", 'optimiser=homes["optimiser"] or fed.still,',
             'optimiser=homes["optimiser"] or getattr(slot, "optimiser", fed.still),',
             f"{REFERENCE}::test_fedavg_with_momentum_decay_and_batchnorm"),
    Mutation("a part's plan depends on its partners", "core/federation.py", "self.round_number, kind, p.name)\n",
             "self.round_number, kind, len(self.method.parts))\n", ALONE, "idle_partners and mixup"),
    Mutation("draws do not depend on the client", "core/federation.py",
             'rng.key(self.policy.seed, "step", number, self.round_number, kind)',
             'rng.key(self.policy.seed, "step", self.round_number, kind)', f"{RULES}::test_draws_belong_to_client_round_and_step"),
    # direction of imports
    Mutation("the core imports a part", "core/population.py", "from .task import Task, task_named\n",
             "from .task import Task, task_named\n\n\ndef _default() -> object:\n    from ..parts.prox import Prox\n    return Prox()\n",
             f"{STRUCTURE}::test_imports_point_one_way"),
    Mutation("a kernel knows the round", "kernels/reach.py", "class Span(",
             "def _round():\n    from ..core import round\n    return round\n\n\nclass Span(",
             f"{STRUCTURE}::test_imports_point_one_way"),
    Mutation("the core holds a kernel", "core/task.py", "DICE_EPS =",
             "def _jit(kernel):\n    import triton\n    return triton.jit(kernel)\n\n\nDICE_EPS =",
             f"{STRUCTURE}::test_kernels_have_rooms_of_their_own"),
    # the papers' own numbers
    Mutation("FFA's variance over clients divided by M − 1", "parts/ffa.py", "lambda x: x.var(0, unbiased=False)", "lambda x: x.var(0)",
             "parts/test_ffa.py::test_variance_over_clients_by_hand"),
    Mutation("FFA's statistics move when the coin is off", "parts/ffa.py",
             "rate = torch.where(on, 1 - self.momentum, 0.0)", "rate = torch.tensor(1 - self.momentum)",
             "parts/test_ffa.py::test_coin_off_leaves_features_and_statistics_alone"),
    Mutation("FFA keeps statistics that it resets", "parts/ffa.py", 'return self._fresh(spec) if self.stats == "kept" else {}',
             "return self._fresh(spec)", "parts/test_ffa.py::test_reset_statistics_start_anew"),
    Mutation("MixStyle's gradient reaches the partner", "parts/mixstyle.py", "torch.var_mean(x.detach(), (2, 3))",
             "torch.var_mean(x, (2, 3))", "parts/test_mixstyle.py::test_by_hand"),
    Mutation("MoEx mixes labels where the coin is off", "parts/moex.py", 'torch.where(plan["on"], self.lam, 1.0)',
             "torch.tensor(self.lam)", "parts/test_moex.py::test_labels_by_hand"),
    Mutation("Manifold Mixup mixes the input's labels alone", "parts/manifold_mixup.py",
             'v.batch._replace(x=self._mixed(v, v.batch.x, ""), target', "v.batch._replace(target",
             "parts/test_manifold_mixup.py::test_the_inputs_turn"),
    Mutation("FedFA sees features before they are mixed", "parts/moex.py", 'name, rank = "moex", 20', 'name, rank = "moex", 40',
             "contract/test_compositions.py::test_fedfa_sees_features_that_were_mixed_before"),
    Mutation("FedMix's slope is divided by the batch's size", "parts/mix.py", 'if self.taylor == "released":', "if self.taylor:",
             "parts/test_mix.py::test_loss_and_gradient_by_hand"),
    Mutation("FedMix averages labels of other samples", "parts/mix.py", "as_probabilities(y.flatten(0, 1), c.spec.classes)",
             "as_probabilities(y.flatten(0, 1).flip(0), c.spec.classes)",
             "parts/test_mix.py::test_averages_are_of_one_client_and_come_with_their_labels"),
    Mutation("kernels without a second derivative where one is needed", "core/assemble.py", "any(p.second_order for p in method.parts)",
             "False", "parts/test_mix.py::test_with_weight_0_no_slope_is_taken"),
    Mutation("one plain round too many before matching", "parts/anchors.py", "if c.round > self.start else",
             "if c.round > self.start + 1 else", "parts/test_anchors.py::test_exactly_t_s_rounds_are_plain"),
    Mutation("anchors weighted by client", "parts/anchors.py", 'mean = s.reduced["sum"] / count.clamp(min=1)[:, None]',
             'mean = s.reduced["sum"] / count.sum()', "parts/test_anchors.py::test_weighted_and_uniform_by_hand"),
    Mutation("prototypes of all epochs", "parts/proto.py", "* (wait <= 0)", "* (wait == wait)",
             "parts/test_proto.py::test_features_of_the_last_epoch"),
    Mutation("a prototype that nobody has pulls to zero", "parts/proto.py", "(seen[target] * (h - proto[target])", "((h - proto[target])",
             "parts/test_proto.py::test_the_pull_by_hand"),
    Mutation("pFedMe's personal model begins anew with every batch", "parts/moreau.py", 'theta = v.scratch["theta"]',
             'theta = {k: v.params[k] for k in v.scratch["theta"]}', "parts/test_moreau.py::test_two_batches_by_hand"),
    Mutation("what a gradient hook notes is lost", "core/step.py",
             ' | {n: ("gradient", new) for n, new in noted.items()}', "",
             "parts/test_moreau.py::test_two_batches_by_hand"),
    Mutation("adversaries step a copy where the first pass is elsewhere", "core/step.py",
             "p if main and p is here[k] else p.detach()", "p.detach()",
             "parts/test_moreau.py::test_adversaries_step_what_they_attached"),
    Mutation("later hooks do not see a first pass that was elsewhere", "core/step.py",
             'for seen in ("given", "trace", "terms", "relabelled", "scratch"):', "for seen in ():",
             "parts/test_moreau.py::test_later_hooks_of_the_step_see_the_first_pass_and_the_model_itself"),
    Mutation("APPLE steps the core by the whole gradient", "parts/apple.py", "longer * (p @ own)", "longer",
             "parts/test_apple.py::test_two_rounds_by_hand"),
    Mutation("APPLE's weights do not see the own core", "parts/apple.py", " + own * (v.params[k] * t).sum()", "",
             "parts/test_apple.py::test_two_rounds_by_hand"),
    Mutation("APPLE's pull never ends", "parts/apple.py", "            return 0.0\n", "            return EPS\n",
             "parts/test_apple.py::test_the_pull_fades_over_so_many_rounds"),
    Mutation("drift with the wrong sign", "parts/drift.py",
             "v.forward(v.received, v.batch.x).logits - v.forward(v.previous, v.batch.x).logits",
             "v.forward(v.previous, v.batch.x).logits - v.forward(v.received, v.batch.x).logits",
             "parts/test_drift.py::test_drift_label_by_hand"),
    Mutation("FedRobust's inputs are changed to the model's advantage", "parts/affine.py", "self.weight * away - v.task_loss",
             "self.weight * away + v.task_loss", "parts/test_affine.py::test_one_step_by_hand"),
    Mutation("FedRobust's clients are served by models of their own", "core/federation.py", " and not p.only_in_training", "",
             "parts/test_affine.py::test_nobody_is_served_by_a_changed_model"),
    Mutation("HarmoFL's amplitudes act in training alone", "core/step.py", "if all_of_them or p.in_every_pass]", "if all_of_them]",
             "parts/test_amplitude.py::test_every_model_sees_normalised_images"),
    Mutation("the received model sees another image than the model", "core/step.py", "if all_of_them or p.in_every_pass]",
             "if all_of_them]", "parts/test_amplitude.py::test_what_clients_brightness_is_cannot_be_learnt", "ntd"),
    Mutation("a second model sees another image than the first", "core/method.py", "p.in_every_pass or p.acts_on == phase.model",
             "p.acts_on == phase.model", "parts/test_amplitude.py::test_what_clients_brightness_is_cannot_be_learnt", "ditto"),
    Mutation("an exported model leaves HarmoFL's amplitudes behind", "runs/export.py", '    if card.get("shared"):', "    if False:",
             "runs/test_use.py::test_what_belongs_to_the_model_goes_with_it"),
    Mutation("VHL's virtual classes are those of the data", "parts/vhl.py", "y + classes)", "y)",
             "parts/test_vhl.py::test_steps_against_plain_modules"),
    Mutation("VHL moves virtual features to the real ones", "parts/vhl.py", "virtual.detach()", "virtual",
             "parts/test_vhl.py::test_steps_against_plain_modules"),
    Mutation("VHL's contrasts go on for the whole round", "parts/vhl.py", 'torch.where(v.scratch["left"] >= 0, apart, 0.0)', "apart",
             "parts/test_vhl.py::test_steps_against_plain_modules", "1"),
    Mutation("MR without the half", "parts/mr.py", "(0.5 if self.half else 1.0)", "1.0", "parts/test_mr.py::test_loss_by_hand"),
    Mutation("MR regularises while FedRep's head trains", "parts/mr.py", "torch.where(steps > 0, term, 0.0)", "term",
             "parts/test_mr.py::test_fedrep_has_no_term_while_its_head_trains"),
    Mutation("MR's gradient is not scaled by μ", "parts/mr.py", 'v.scratch["mean"] + self.momentum * now', 'v.scratch["mean"] + now',
             "parts/test_mr.py::test_gradient_by_hand"),
    Mutation("both pieces are the first", "parts/maml.py", "g = grad_at(adapted, cut[1])", "g = grad_at(adapted, cut[0])",
             "parts/test_maml.py::test_pieces_are_different_samples_by_hand"),
    Mutation("the central difference has the wrong sign", "parts/maml.py", "return tree.sub(g, tree.scale(curved,",
             "return tree.add(g, tree.scale(curved,", "parts/test_maml.py::test_hessian_free_by_hand"),
    Mutation("adaptation at the run's learning rate", "core/client.py", "self.pace * numbers", "numbers",
             "parts/test_maml.py::test_steps_of_adaptation_by_hand"),
    Mutation("a piece's pass sees the whole batch", "core/step.py", "        at.given = batch\n", "",
             "parts/test_maml.py::test_pieces_are_different_samples_by_hand"),
    Mutation("α leaves [0, 1]", "parts/apfl.py", ".clamp(0, 1)", "", "parts/test_apfl.py::test_alpha_stays_between_0_and_1_by_hand"),
    Mutation("v moves by the whole gradient", "parts/apfl.py", "tree.scale(g, -v.lr * alpha)", "tree.scale(g, -v.lr)",
             "parts/test_apfl.py::test_two_steps_by_hand"),
    Mutation("the mixture's statistics are forgotten", "parts/apfl.py", '"buffers": seen.buffers}', '"buffers": own["buffers"]}',
             "parts/test_apfl.py::test_the_mixture_has_statistics_of_its_own"),
    Mutation("no gradient through a part's own model", "core/step.py", "(mine or learn) and", "mine and",
             "parts/test_apfl.py::test_two_steps_by_hand"),
    Mutation("the personal head pulls at the generic one", "parts/rod.py", "v.trace.logits.detach() + self._own",
             "v.trace.logits + self._own", "parts/test_rod.py::test_step_against_plain_modules"),
    Mutation("classes that a client lacks are balanced too", "parts/rod.py", "torch.where(n > 0, ", "torch.where(n > -1, ",
             "parts/test_rod.py::test_absent_classes_stay_where_they_are"),
    Mutation("a pass goes on in the mode of a module run in its midst", "core/network.py", "self._hold(model, bool(train))",
             "self._hold(model, False)", "core/test_network.py::test_a_tap_may_run_a_module_of_another_model_in_the_midst_of_a_pass"),
    Mutation("the shift is forgotten", "core/client.py", 'after = {"kept": kept, "personal": slot.personal,',
             'after = {"kept": kept, "personal": homes["personal"],', "parts/test_prbm.py::test_starts_at_zero_and_stays_with_the_client"),
    # what travels to and from workers
    Mutation("results of workers may name functions", "engines/_parcel.py", "self._tensors(file, places, copy), self.orders)",
             "self._tensors(file, places, copy), True)", "engines/test_plain.py::test_only_who_takes_orders_finds_functions"),
    Mutation("an error may be any callable", "engines/_plain.py", "if not (isinstance(found, type) and issubclass(found, Exception)):",
             "if not callable(found):", "engines/test_plain.py::test_errors_keep_their_class_where_it_is_known"),
    Mutation("frozen parameters thaw on their way", "engines/_plan.py", "requires_grad=trains)", "requires_grad=True)",
             "engines/test_plain.py::test_frozen_parameters_stay_frozen_in_workers"),
    # kernels of our own choice
    Mutation("pooling forgets its layout", "layers/pooling.py", "        return out.contiguous()\n", "        return out\n",
             "layers/test_pooling.py::test_same_numbers_and_strides"),
    Mutation("large numbers are taken for infinite", "tree.py", "        if bool(sums):\n            return sums\n",
             "        return sums\n", "test_tree.py::test_all_finite"),
    # privacy
    Mutation("dp leaves other uploads unclipped", "parts/dp.py", "theirs = {path: self.scale * t for path, t in tree.paths(uploads) if",
             "theirs = {path: self.scale * t for path, t in tree.paths({}) if",
             "parts/test_dp.py::test_one_norm_for_the_model_and_all_uploads"),
    Mutation("dp adds each share whole", "parts/dp.py", '"client": c.expected**-0.5', '"client": 1.0',
             "parts/test_dp.py::test_noise_in_the_average"),
    Mutation("dp clips from the wrong model", "core/client.py", "view = ClientView(fed, number, part, fed.model, state, what,",
             "view = ClientView(fed, number, part, model, state, what,",
             "parts/test_dp.py::test_the_change_is_counted_from_the_servers_model"),
    Mutation("dp's client keeps what it sent", "core/client.py", '"previous": slot.model if homes["previous"]',
             '"previous": model if homes["previous"]', "parts/test_dp.py::test_the_change_is_counted_from_the_servers_model"),
    Mutation("missing shares are not missed", "privacy/ledger.py", "whole * expected / len(ids) if", "whole if",
             "privacy/test_accountant.py::test_shares_of_clients_that_did_not_arrive_are_missing"),
    Mutation("noise that forgets what it hides", "privacy/noise.py", "    for tensor in hidden:\n", "    for tensor in ():\n",
             "privacy/test_noise.py::test_the_same_upload_carries_the_same_noise_and_another_upload_other_noise"),
    Mutation("looks before training go out as they are", "core/client.py", 'if upload and fed.method.using("release"):', "if False:",
             "parts/test_dp.py::test_a_look_before_training_carries_noise"),
    Mutation("a round's second release is free", "privacy/ledger.py", "joint, drawn = joint + spent,", "joint, drawn = spent,",
             "privacy/test_accountant.py::test_a_round_of_several_releases_is_one_sampled_release"),
)


def copy_of(source: Path, where: Path) -> Path:
    target = where / "src"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return target


def run_tests(src: Path, tests: list[str], only: str = "") -> tuple[int, str]:
    """Exit code of pytest with the package taken from `src`, and its last line about a failure."""
    env = {**os.environ, "PYTHONPATH": str(src), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line",
               *(["-k", only] if only else []), *tests]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (lines or done.stdout.splitlines() or [done.stderr])[-1]


def check_source(src: Path) -> None:
    """The copy must be what the tests import, or nothing that follows means anything."""
    env = {**os.environ, "PYTHONPATH": str(src)}
    found = subprocess.run([sys.executable, "-c", "import consilience; print(consilience.__file__)"], env=env, cwd=src,
                           capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_relative_to(src):
        raise SystemExit(f"The tests would import {found}, not the copy.")


def try_one(mutation: Mutation) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        src = copy_of(ROOT / "src", Path(folder))
        path = src / "consilience" / mutation.file
        text = path.read_text()
        if text.count(mutation.old) < 1:
            raise SystemExit(f"{mutation.name}: {mutation.file} no longer contains {mutation.old!r}. Bring the list up to date.")
        path.write_text(text.replace(mutation.old, mutation.new, 1))
        code, said = run_tests(src, [f"tests/{mutation.test}"], mutation.only)
        if code not in (0, 1):                       # 1: tests failed; anything else says nothing about the rule
            raise SystemExit(f"{mutation.name}: the tests could not be run ({said}).")
        return code == 1, said


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(w in m.name for w in words)]
    with tempfile.TemporaryDirectory() as folder:    # without any mutation the named tests pass, so a failure below is its doing
        src = copy_of(ROOT / "src", Path(folder))
        check_source(src)
        by_words: dict[str, set[str]] = {}
        for m in chosen:
            by_words.setdefault(m.only, set()).add(f"tests/{m.test}")
        for only, tests in by_words.items():
            code, said = run_tests(src, sorted(tests), only)
            if code:
                raise SystemExit(f"The named tests do not pass without any mutation: {said}")
    missed = 0
    for mutation in chosen:
        caught, said = try_one(mutation)
        missed += not caught
        print(f"{'caught' if caught else 'MISSED'}  {mutation.name}: {said.removeprefix('FAILED ')[:150]}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
