"""activation_checkpointing: bytes kept, FLOPs run, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fasttrain import ConfigError
from fasttrain.core.strategy import Context
from fasttrain.models.bert import BertForMaskedLM
from fasttrain.models.bert_config import BertConfig
from fasttrain.models.resnet import build_resnet
from fasttrain.nn.blocks import find_blocks
from fasttrain.nn.recompute import checkpoint_blocks
from fasttrain.nn.selective import PRESETS as PRESETS_OF_TORCH
from fasttrain.strategies.activation_checkpointing import (
    PRESETS,
    BudgetConfig,
    Full,
    FullConfig,
    Selective,
    SelectiveConfig,
)
from tests.helpers import QUIET, largest_difference, points, state
from tests.stack import Restless, Stack, StackModel, gradients

BERT = BertConfig(vocabulary=50, width=16, layers=4, heads=2, feedforward=64, dropout=0.0)


def tokens(batch=2, length=12):
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(0))


def images(batch=4):
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(0))


MODELS = {
    "stack": (lambda: StackModel(blocks=4), lambda: points()[0]),
    "stack with dropout": (lambda: StackModel(dropout=0.3, blocks=4), lambda: points()[0]),
    "stack with batch norm": (lambda: StackModel(nn.BatchNorm1d, blocks=4), lambda: points()[0]),
    "bert": (lambda: BertForMaskedLM(BERT), tokens),
    "bert with dropout": (
        lambda: BertForMaskedLM(BertConfig(**{**vars(BERT), "dropout": 0.1})),
        tokens,
    ),
    "resnet": (lambda: build_resnet("resnet18", num_classes=3, stem="small", width=8), images),
}


def build(name, every=None):
    make, data = MODELS[name]
    torch.manual_seed(0)
    model = make()
    if every is not None:
        checkpoint_blocks(find_blocks(model), every)
    return model, data()


def bytes_kept(model, forward):
    """Bytes that autograd keeps until backward, each storage once, parameters and buffers apart.

    Non-reentrant checkpointing keeps its inputs by references of its own: they are added where a block is called.
    """
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage, storage.nbytes())  # held, so that no address is given twice
        return tensor

    hooks = []
    for block in find_blocks(model):
        hooks.append(
            block.register_forward_pre_hook(
                lambda _, args: [pack(a) for a in args if isinstance(a, torch.Tensor)] and None
            )
        )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward().sum().backward()
    for hook in hooks:
        hook.remove()
    return sum(size for _, size in kept.values())


def test_full_keeps_the_inputs_of_blocks_and_nothing_inside_them():
    plain, x = build("stack")
    recomputed, _ = build("stack", every=1)
    everything, rest = bytes_kept(plain, lambda: plain(x)), bytes_kept(recomputed, lambda: recomputed(x))
    # 24 samples of float32, 8 wide: the input of the model, of the four blocks and of the head.
    vector = 24 * 8 * 4
    assert rest == 6 * vector
    # Inside a block: normalised 8, expanded 16, after gelu 16, and mean and deviation of the norm.
    assert everything == 6 * vector + 4 * (5 * vector + 2 * 24 * 4)


@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_each_block_that_is_recomputed_keeps_less(name):
    kept = []
    for every in (None, 4, 2, 1):
        model, x = build(name, every)
        kept.append(bytes_kept(model, lambda model=model, x=x: model(x)))
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4
    assert kept[-1] < 0.45 * kept[0]


def flops(model, x, backward=True):
    with FlopCounterMode(display=False) as counter:
        output = model(x)
        if backward:
            output.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("every", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", ["stack", "bert", "resnet"])
def test_the_forward_of_chosen_blocks_is_run_twice_and_nothing_else(name, every):
    plain, x = build(name)
    blocks = find_blocks(plain)
    forward_of = {}

    def measure(block):
        def counted(*args, **kwargs):
            with FlopCounterMode(display=False) as counter:
                output = type(block).forward(block, *args, **kwargs)
            forward_of[id(block)] = counter.get_total_flops()
            return output

        return counted

    for block in blocks:
        block.forward = measure(block)
    plain(x)
    for block in blocks:
        del block.forward
    step = flops(plain, x)
    model, _ = build(name, every)
    # A recomputation ends where backward has all it needs: a block that ends in a product leaves that one out.
    left_out = {"stack": 2 * 24 * 16 * 8}.get(name, 0)
    again = sum(forward_of[id(block)] - left_out for block in blocks[::every])
    assert again > 0
    assert flops(model, x) == step + again


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_statistics_keep_their_bits(name, every):
    results = []
    for chosen in (None, every):
        model, x = build(name, chosen)
        torch.manual_seed(5)
        for _ in range(2):  # the masks of dropout are replayed, and go on as they would have
            output = model(x)
            torch.rand(3)  # draws between forward and backward do not matter
            output.square().mean().backward()
        results.append((output.detach(), gradients(model), dict(model.named_buffers())))
    assert torch.equal(results[0][0], results[1][0])
    assert largest_difference(results[0][1], results[1][1]) == 0.0
    assert largest_difference({**results[0][2], "": output}, {**results[1][2], "": output}) == 0.0


def test_statistics_of_batch_norm_move_once():
    """Mean 2.5 and momentum 0.1: 0.25 after one step. Two forwards would give 0.475."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(1), nn.Linear(1, 1)

        def forward(self, x):
            return self.linear(self.norm(x))

    block = Normed()
    checkpoint_blocks([block])
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]], requires_grad=True)
    block(x).sum().backward()
    assert block.norm.running_mean.item() == 0.25
    assert block.norm.num_batches_tracked.item() == 1
    assert block.norm.running_mean.requires_grad is False


def test_two_forwards_before_one_backward_move_statistics_twice_and_differentiate():
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = StackModel(nn.BatchNorm1d)
        if recompute:
            checkpoint_blocks(model.blocks)
        x, _ = points()
        (model(x[:12]).square().mean() + model(x[12:]).square().mean()).backward()
        results.append((gradients(model), dict(model.named_buffers())))
    assert results[1][1]["blocks.0.norm.num_batches_tracked"].item() == 2
    assert largest_difference(results[0][0], results[1][0]) == 0.0
    assert largest_difference(results[0][1], results[1][1]) == 0.0


def test_the_mask_of_dropout_is_the_same_in_forward_and_backward():
    class Dropped(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5) * x

    block = Dropped()
    checkpoint_blocks([block])
    x = torch.ones(1000, requires_grad=True)
    output = block(x)
    torch.rand(17)
    output.sum().backward()
    assert torch.equal(output == 0, x.grad == 0)
    assert 400 < (x.grad == 0).sum() < 600


def test_nested_arguments_keywords_and_objects_pass_through():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, parts, *, scale, options, flag=True, nothing=None):
            assert flag == "yes"
            assert nothing is None
            x, (y, z) = parts["x"], parts["rest"]
            return {"sum": self.linear(x) * options["by"] + y * scale, "z": z, "name": options["name"]}

    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        block = Odd()
        if recompute:
            assert checkpoint_blocks([block]) == 1
        x, y = torch.ones(2, 4, requires_grad=True), torch.full((2, 4), 2.0, requires_grad=True)
        scale = torch.tensor(3.0, requires_grad=True)
        out = block({"x": x, "rest": (y, [1, 2])}, scale=scale, options={"by": 2, "name": "n"}, flag="yes")
        assert (out["z"], out["name"]) == ([1, 2], "n")
        out["sum"].square().sum().backward()
        results.append({"x": x.grad, "y": y.grad, "scale": scale.grad, **gradients(block)})
    assert len(results[0]) == 5
    assert largest_difference(*results) == 0.0


def test_layers_of_torch_with_masks_as_keywords_are_recomputed():
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        if recompute:
            assert checkpoint_blocks(find_blocks(model)) == 2
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
        padding = torch.arange(5) >= torch.tensor([[5], [4], [2]])
        model(
            x, mask=nn.Transformer.generate_square_subsequent_mask(5), src_key_padding_mask=padding.float() * -1e9
        ).sum().backward()
        results.append(gradients(model))
    assert len(results[0]) == 24
    assert largest_difference(*results) == 0.0


def test_frozen_layers_before_a_block_do_not_cut_its_gradients():
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = StackModel()
        model.embed.requires_grad_(False)
        model.blocks[0].expand.requires_grad_(False)
        if recompute:
            checkpoint_blocks(model.blocks)
        model(points()[0]).sum().backward()
        results.append(gradients(model))
    assert len(results[0]) == 12
    assert largest_difference(*results) == 0.0


def test_autocast_is_replayed():
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = StackModel()
        if recompute:
            checkpoint_blocks(model.blocks)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(points()[0])
        output.float().square().mean().backward()
        results.append(gradients(model))
    assert largest_difference(*results) == 0.0


def counted_forwards(model):
    calls = []
    for number, block in enumerate(model.blocks):
        block.norm.register_forward_hook(lambda *_, number=number: calls.append(number))
    return calls


@pytest.mark.parametrize(
    ("every", "expected"), [(1, [0, 1, 2, 3, 3, 2, 1, 0]), (2, [0, 1, 2, 3, 2, 0]), (3, [0, 1, 2, 3, 3, 0])]
)
def test_each_chosen_block_is_run_again_once_in_reverse(every, expected):
    model, x = build("stack", every)
    calls = counted_forwards(model)
    model(x).sum().backward()
    assert calls == expected


def test_evaluation_recomputes_nothing_and_keeps_nothing():
    model, x = build("stack", every=1)
    calls = counted_forwards(model)
    with torch.no_grad():
        output = model(x)
    assert calls == [0, 1, 2, 3]
    assert output.grad_fn is None
    plain, _ = build("stack")
    assert torch.equal(output, plain(x))


def test_the_strategy_checkpoints_what_the_trainer_names_as_blocks():
    class Named(Stack):
        def blocks(self, model):
            return [model.blocks[1]]

    trainer = Named(batch_size=24, steps=1, activation_checkpointing="full", **QUIET)
    calls = counted_forwards(trainer.model)
    trainer.fit()
    assert calls == [0, 1, 1]


def test_the_whole_model_as_one_block_is_refused():
    class Whole(Stack):
        def blocks(self, model):
            return [model]

    with pytest.raises(ConfigError) as caught:
        Whole(batch_size=8, activation_checkpointing="full", **QUIET)
    assert str(caught.value) == (
        "activation_checkpointing=full around the whole model saves nothing: everything is recomputed, and then kept, "
        "at once; return its repeated parts from blocks(model)."
    )


def test_a_model_without_blocks_says_what_to_write():
    class Flat(Stack):
        def build_model(self):
            return nn.Sequential(nn.Linear(8, 4))

    with pytest.raises(
        ConfigError, match="activation_checkpointing=full: no repeated blocks were found in Sequential; override blocks"
    ):
        Flat(batch_size=8, activation_checkpointing="full", **QUIET)


def test_every_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.every=0 must be 1 or more"):
        FullConfig(every=0)


def test_training_keeps_its_bits_with_microbatches_dropout_and_batch_norm():
    results = []
    for checkpointing in (None, {"name": "full", "every": 2}, "full"):
        accumulation = {"name": "microbatches", "num": 2}
        trainer = Restless(
            batch_size=8, steps=5, accumulation=accumulation, activation_checkpointing=checkpointing, **QUIET
        )
        trainer.fit()
        results.append(state(trainer))
    assert largest_difference(results[0], results[1]) == largest_difference(results[0], results[2]) == 0.0


def test_the_strategy_can_be_used_without_a_trainer():
    model = StackModel()
    names = list(model.state_dict())
    assert Full(None, Context(device=torch.device("cpu"))).model(model) is model
    assert list(model.state_dict()) == names
    calls = counted_forwards(model)
    model(points()[0]).sum().backward()
    assert calls == [0, 1, 1, 0]


# ---- selective and budget


def test_selective_recomputes_norms_and_keeps_products_of_the_named_blocks():
    class Named(Stack):
        def blocks(self, model):
            return [model.blocks[1]]

    setting = {"name": "selective", "keep": "matmuls"}
    trainer = Named(batch_size=24, steps=1, activation_checkpointing=setting, **QUIET)
    calls = counted_forwards(trainer.model)
    x = points()[0]
    plain, rest = flops(StackModel(), x), flops(trainer.model, x)
    assert plain == rest
    assert calls == [0, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"every": 0}, "activation_checkpointing.every=0 must be 1 or more."),
        ({"flops_per_byte": -1.0}, "activation_checkpointing.flops_per_byte=-1.0 must be a number from 0 on; "),
        ({"flops_per_byte": float("nan")}, "activation_checkpointing.flops_per_byte=nan must be a number from 0 on; "),
        ({"keep": ()}, "activation_checkpointing.keep=[] keeps nothing; use activation_checkpointing=full"),
        (
            {"keep": "matmul"},
            "activation_checkpointing.keep: 'matmul' is no group of operations; did you mean 'matmuls'?",
        ),
    ],
)
def test_wrong_settings_of_selective_are_refused_without_torch(wrong, told):
    with pytest.raises(ConfigError) as caught:
        SelectiveConfig(**wrong)
    assert str(caught.value).startswith(told)


def test_a_wrong_operation_is_refused_before_the_first_step():
    with pytest.raises(ConfigError) as caught:
        Stack(
            batch_size=8,
            activation_checkpointing={"name": "selective", "keep": ["attention", "aten.convolutoin"]},
            **QUIET,
        )
    assert str(caught.value) == (
        "activation_checkpointing.keep: there is no operation 'aten.convolutoin'; did you mean 'aten.convolution'?"
    )


def test_the_groups_of_operations_are_known_with_and_without_torch():
    assert sorted(PRESETS_OF_TORCH) == list(PRESETS)


@pytest.mark.parametrize("setting", ["selective", {"name": "selective", "keep": ["matmuls"], "every": 2}])
def test_selective_training_keeps_its_bits_with_microbatches_dropout_and_batch_norm(setting):
    results = []
    for checkpointing in (None, setting):
        accumulation = {"name": "microbatches", "num": 2}
        trainer = Restless(
            batch_size=8, steps=5, accumulation=accumulation, activation_checkpointing=checkpointing, **QUIET
        )
        trainer.fit()
        results.append(state(trainer))
    assert largest_difference(*results) == 0.0


@pytest.mark.parametrize("name", ["selective", "full"])
def test_the_whole_model_as_one_block_is_refused_by_name(name):
    class Whole(Stack):
        def blocks(self, model):
            return [model]

    with pytest.raises(ConfigError, match=f"activation_checkpointing={name} around the whole model saves nothing"):
        Whole(batch_size=8, activation_checkpointing=name, **QUIET)


def test_selective_can_be_used_without_a_trainer():
    model = StackModel()
    names = list(model.state_dict())
    strategy = Selective(SelectiveConfig(keep="aten.addmm"), Context(device=torch.device("cpu")))
    assert strategy.model(model) is model
    assert list(model.state_dict()) == names


def test_a_budget_needs_the_compiler():
    with pytest.raises(ConfigError) as caught:
        Stack(batch_size=8, activation_checkpointing="budget", **QUIET)
    assert (
        "activation_checkpointing=budget cannot be used with compile=null: the compiler is what plans the recomputation; "
        "use compile=blocks, or activation_checkpointing=selective, which works without"
    ) in str(caught.value)
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.budget=1\.5 must be from 0 to 1"):
        BudgetConfig(budget=1.5)


COMPILED = {"name": "blocks", "backend": "aot_eager"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "setting", [{"name": "budget", "budget": 0.0}, "selective", {"name": "selective", "keep": "matmuls"}]
)
def test_compiled_training_is_eager_training(setting):
    torch.compiler.reset()
    results = []
    for slots in ({}, {"activation_checkpointing": setting, "compile": COMPILED}):
        trainer = Stack(batch_size=8, steps=4, optimizer="sgd", **slots, **QUIET)
        trainer.fit()
        results.append(state(trainer))
    assert largest_difference(*results) < 1e-6
