"""Fixtures shared by all tests. Nothing here touches the network."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

from tiny import ROOT, tiny_decoder, tiny_model


torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model():
    """A tiny full model; tests must not change it."""
    return tiny_model()


@pytest.fixture(scope="session")
def decoder():
    """A tiny decoder with cross-attention to tokens of width 24; tests must not change it."""
    return tiny_decoder()


@pytest.fixture(scope="session")
def processor():
    from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor

    return TrafficVLMProcessor.from_pretrained(ROOT)
