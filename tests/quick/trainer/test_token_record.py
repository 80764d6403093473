"""The record of a step's tokens, against log-probabilities of plain transformers, row by row."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.advantages import group_advantages
from art_server.shared.trainer_messages import Batch, TrainableGroup, TrainableTrajectory, TrainTask
from art_server.store.model_folder import TOKENS_FILE
from art_server.trainer.job import train
from art_server.trainer.policy import Policy
from tests.makers.first_steps import write_first_checkpoint


def record(policy: Policy, folder: Path, batch: Batch, **config: Any) -> tuple[dict, dict]:
    """The tensors and the metadata that a step writes, from a fresh adapter (the policy is the base)."""
    write_first_checkpoint(policy.base_model, LoRAConfig(), 0, folder / "in")
    task = TrainTask(
        lora=LoRAConfig(),
        in_dir=str(folder / "in"),
        out_dir=str(folder / "out"),
        config=TrainConfig(learning_rate=1e-2, **config),
        batch=batch,
    )
    train(policy, task, 4096, lambda _: None)
    file = folder / "out" / TOKENS_FILE
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
    return load_file(file), {name: json.loads(text) for name, text in metadata.items()}


def sequences(batch: Batch) -> list[tuple[int, int, Any]]:
    """Group, trajectory and sequence of all sequences, in order."""
    return [
        (g, t, sequence)
        for g, group in enumerate(batch.groups)
        for t, trajectory in enumerate(group.trajectories)
        for sequence in trajectory.sequences
    ]


def test_each_trained_token_has_the_plain_logprob_and_its_trajectory_s_advantage(
    policy: Policy, tmp_path: Path, make_batch
) -> None:
    batch = make_batch(3)
    dead = TrainableGroup(
        trajectories=[
            TrainableTrajectory(reward=1.0, sequences=trajectory.sequences)
            for trajectory in batch.groups[0].trajectories
        ],
        number=7,
    )
    batch = Batch(groups=[dead, *batch.groups])
    tensors, structure = record(policy, tmp_path, batch)

    base = AutoModelForCausalLM.from_pretrained(policy.base_model, dtype=torch.float32)
    spans = [
        (g, t, span)
        for g, group in enumerate(structure["groups"])
        for t, trajectory in enumerate(group["trajectories"])
        for span in trajectory
    ]
    assert structure["groups"][0]["number"] == 7
    num_trained = 0
    for (g, t, sequence), (in_group, in_trajectory, (first, stop)) in zip(sequences(batch), spans, strict=True):
        assert (g, t) == (in_group, in_trajectory)
        assert tensors["token_ids_T"][first:stop].tolist() == sequence.token_ids
        advantages = group_advantages([trajectory.reward for trajectory in batch.groups[g].trajectories])
        with torch.no_grad():
            logits_TV = base(input_ids=torch.tensor([sequence.token_ids])).logits[0]
        logprobs_TV = torch.log_softmax(logits_TV, -1)
        for index, sampled in enumerate(sequence.logprobs):
            seen = {name: float(values[first + index]) for name, values in tensors.items()}
            if sampled is None:
                assert math.isnan(seen["sampled_logprobs_T"])
            else:
                assert seen["sampled_logprobs_T"] == pytest.approx(sampled, abs=1e-6)
            if sampled is None or index == 0 or g == 0:
                assert math.isnan(seen["trainer_logprobs_T"])
                assert math.isnan(seen["advantages_T"])
                continue
            num_trained += 1
            assert advantages is not None
            expected = float(logprobs_TV[index - 1, sequence.token_ids[index]])
            assert seen["trainer_logprobs_T"] == pytest.approx(expected, abs=1e-4)
            assert seen["advantages_T"] == pytest.approx(advantages[t], abs=1e-6)
            assert seen["ratios_T"] == pytest.approx(1.0, abs=1e-6)
            entropy = float(-(logprobs_TV[index - 1].exp() * logprobs_TV[index - 1]).sum())
            assert seen["entropies_T"] == pytest.approx(entropy, abs=1e-3)
    assert num_trained == int(np.isfinite(tensors["trainer_logprobs_T"]).sum()) > 0


def test_later_optimizer_steps_replace_ratios_and_keep_the_start_s_logprobs(
    policy: Policy, tmp_path: Path, make_batch
) -> None:
    once, _ = record(policy, tmp_path / "once", make_batch(5))
    twice, _ = record(policy, tmp_path / "twice", make_batch(5), passes=3)
    np.testing.assert_allclose(once["trainer_logprobs_T"], twice["trainer_logprobs_T"], atol=1e-5)
    ratios = twice["ratios_T"][np.isfinite(twice["ratios_T"])]
    assert np.abs(ratios - 1).max() > 1e-3, "the policy has moved"
    assert twice["is_clipped_T"].sum() > 0, "and some tokens met the clip"
    assert once["is_clipped_T"].sum() == 0


def test_a_job_without_signal_leaves_a_record_without_trained_tokens(
    policy: Policy, tmp_path: Path, make_batch
) -> None:
    groups = [
        TrainableGroup(
            trajectories=[
                TrainableTrajectory(reward=0.0, sequences=trajectory.sequences) for trajectory in group.trajectories
            ]
        )
        for group in make_batch(6).groups
    ]
    tensors, structure = record(policy, tmp_path, Batch(groups=groups))
    assert np.isnan(tensors["advantages_T"]).all()
    assert np.isfinite(tensors["sampled_logprobs_T"]).any()
    assert [group["number"] for group in structure["groups"]] == list(range(len(groups)))
    assert structure["texts"] == {}, "this base has no tokenizer"
