"""The corpus is the same bytes everywhere and of the kinds it claims; the model trains; loads are counted once and steered once."""

import dataclasses
import re

import pytest
import torch

import moe_lib.experts.grouped as grouped_module
from moe_lib.balance import load
from moe_lib.corpus import KINDS, LENGTH, PAD, WRITERS, Dice, Documents, decode, encode, make_corpus, write
from moe_lib.experts import GroupedExperts
from moe_lib.runs import SEEDS, SETTINGS, about, fingerprint, load_runs, path_of, save_runs
from moe_lib.toy import DENSE, TOY, Recipe, ToyModel, evaluate, predictions, summed_loss, train, train_step

TINY = TOY.replace(hidden_size=16, moe_intermediate_size=8, n_routed_experts=8)


@pytest.fixture(scope="module")
def corpus():
    return make_corpus()


@pytest.fixture(scope="module")
def few():
    return make_corpus(seed=1, train=64, held_out=16)


# --- the corpus ------------------------------------------------------------------------------------------------------


def test_the_corpus_is_the_same_on_every_machine(corpus):
    assert fingerprint(corpus) == "171444b18d9bad0120e14fa4523efe36b30b76fbeab66d4d409910c0b9162fc5"


def test_training_and_held_out_share_no_text_and_every_text_is_there_once(corpus):
    train_texts, held_out_texts = ([bytes(row) for row in part.tokens.tolist()] for part in corpus)
    assert len(set(train_texts)) == len(train_texts) == 9600 and len(set(held_out_texts)) == len(held_out_texts) == 512
    assert not set(train_texts) & set(held_out_texts)


def test_the_split_is_fixed_whatever_is_held_out(few):
    more = make_corpus(seed=1, train=64, held_out=40)
    assert torch.equal(more[0].tokens, few[0].tokens) and torch.equal(more[1].tokens[:16], few[1].tokens)


def test_eight_kinds_each_with_its_share(corpus):
    assert len(KINDS) == len(set(KINDS)) == 8
    share = corpus[0].kinds.bincount(minlength=8) / len(corpus[0])
    assert share.min() > 0.11 and share.max() < 0.14


def is_balanced(text):
    open_ = []
    for c in text:
        if c in "([{<":
            open_.append(c)
        elif not open_ or open_.pop() + c not in ("()", "[]", "{}", "<>"):
            return False
    return not open_


def is_date(text):
    day, month, year, iso = re.fullmatch(r"(\d+) ([A-Z][a-z]+) (\d{4}) is (\S+)\.", text).groups()
    months = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
    return iso == f"{year}-{months.index(month[:3]) + 1:02}-{int(day):02}"


def roman_value(text):
    values = [{"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}[c] for c in text]
    return sum(-v if v < after else v for v, after in zip(values, [*values[1:], 0]))


RIGHT = {
    "sums": lambda t: eval(t.replace("=", "==")) and re.fullmatch(r"\d+\+\d+=\d+", t),
    "brackets": is_balanced,
    "dates": is_date,
    "rhymes": lambda t: len({re.search("[aeiou].*", word).group() for word in t.split(", ")}) == 1,
    "genes": lambda t: t[:6].translate(str.maketrans("ACGT", "TGCA")) == t[7:],
    "code": lambda t: compile(t.replace(": ", ":\n ").rstrip(";"), "", "exec"),
    "morse": lambda t: re.fullmatch(r"[A-Z]{4}: [.-]+( [.-]+){3}", t),
    "romans": lambda t: roman_value(t.split("=")[0]) == int(t.split("=")[1]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_its_rule(kind):
    """So there is something to learn: sums are right, brackets close, dates agree, words rhyme."""
    dice = Dice(5)
    for _ in range(200):
        assert RIGHT[kind](WRITERS[KINDS.index(kind)](dice))


def test_documents_fit_their_row_and_come_back_from_their_tokens(few):
    dice = Dice(2)
    for n in range(400):
        text = write(dice, n % 8)
        assert 30 <= len(text) <= LENGTH and text[0] == text[-1] == "\n" and "\n" not in text[1:-1]
        assert decode(torch.tensor(encode(text) + [PAD] * 3)) == text
    lengths = few[0].mask.sum(1)
    assert torch.equal(few[0].mask, torch.arange(LENGTH) < lengths.unsqueeze(1))
    assert torch.equal(few[0].token_kinds[:, 0], few[0].kinds) and few[0].token_kinds.shape == few[0].tokens.shape


# --- the model -------------------------------------------------------------------------------------------------------


def weights_of(module):
    return sum(p.numel() for p in module.parameters())


def test_dense_models_have_as_many_feed_forward_weights_as_a_token_uses_or_as_there_are():
    block = ToyModel().layers[0].mlp
    routers = TOY.router_params
    assert weights_of(ToyModel(dense="active").layers[0].mlp) == TOY.active_block_params - routers
    assert (
        weights_of(ToyModel(dense="total").layers[0].mlp)
        == TOY.block_params - routers
        == weights_of(block) - block.gate.weight.numel()
    )
    assert set(DENSE) == {"active", "total"}


def test_no_character_sees_a_later_one_and_none_sees_padding(few):
    model, tokens = ToyModel(TINY).double(), few[0].tokens[:4].clone()
    logits, routings = model(tokens)
    assert logits.shape == (4, LENGTH, 128) and len(routings) == 2
    changed = tokens.clone()
    changed[:, 20:] = 65
    assert torch.allclose(model(changed)[0][:, :20], logits[:, :20])
    assert not torch.allclose(model(changed)[0][:, 20:], logits[:, 20:])


def test_the_loss_is_that_of_each_next_character(few):
    documents = few[0][:3]
    logits = torch.randn(3, LENGTH, 128, dtype=torch.float64)
    wanted = 0.0
    for row in range(3):
        for t in range(int(documents.mask[row].sum()) - 1):
            wanted -= logits[row, t].log_softmax(0)[documents.tokens[row, t + 1]].item()
    assert summed_loss(logits, documents).item() == pytest.approx(wanted)
    assert predictions(documents) == documents.mask.sum() - 3


def small_model(seed=0, **kwargs):
    torch.manual_seed(seed)
    return ToyModel(TINY, **kwargs).double()


def one_step(documents, recipe, **kwargs):
    model = small_model(**kwargs)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    loss, by_kind = train_step(model, optimiser, documents, recipe)
    return model, loss, by_kind


@pytest.mark.parametrize("changes", [{"checkpointing": True}, {"micro_batches": 4}, {"micro_batches": 8, "checkpointing": True}])
@pytest.mark.parametrize("help_", [{}, {"gamma": 0.01}, {"aux_loss_alpha": 0.01}])
def test_checkpointing_and_micro_batches_change_nothing(few, changes, help_):
    """Recomputation must not count a load twice, and the bias moves once a step by the loads of all micro-batches."""
    recipe = Recipe(batch=16, **help_)
    documents = few[0][:16]
    model, loss, by_kind = one_step(documents, recipe)
    other, other_loss, other_by_kind = one_step(documents, dataclasses.replace(recipe, **changes))
    assert torch.equal(other_by_kind, by_kind) and other_loss == pytest.approx(loss.item())
    assert by_kind.sum() == 2 * 2 * documents.mask.sum()  # two layers, two experts a token, no padding
    for ours, theirs in zip(model.layers, other.layers):
        assert torch.equal(ours.mlp.gate.e_score_correction_bias, theirs.mlp.gate.e_score_correction_bias)
        moved = ours.mlp.gate.e_score_correction_bias.abs().sum()
        assert (moved > 0) == bool(recipe.gamma)
    for (name, mine), yours in zip(model.named_parameters(), other.parameters()):
        assert torch.allclose(mine, yours, atol=1e-12), name


@pytest.mark.parametrize("experts", ["loop", "grouped"])
def test_every_experts_implementation_trains_the_same(few, experts):
    reference, other = small_model(), small_model(experts=experts)
    for mine, yours in zip(reference.layers, other.layers):
        yours.mlp.load_hf(mine.mlp.to_hf())
    other.load_state_dict({k: v for k, v in reference.state_dict().items() if ".mlp." not in k}, strict=False)
    recipe, results = Recipe(batch=16, gamma=0.01), []
    for model in (reference, other):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        results.append([train_step(model, optimiser, few[0][:16], recipe)[0].item() for _ in range(3)])
    assert results[0] == pytest.approx(results[1], rel=1e-9)
    for mine, yours in zip(reference.layers, other.layers):
        for key, tensor in mine.mlp.to_hf().items():
            assert torch.allclose(tensor, yours.mlp.to_hf()[key], atol=1e-9), key


def test_padding_moves_neither_loads_nor_bias_nor_weights(few):
    short = few[0][few[0].mask.sum(1) < LENGTH - 8][:8]
    cut = Documents(short.tokens[:, : int(short.mask.sum(1).max())], short.kinds)
    assert cut.tokens.shape[1] < LENGTH
    recipe = Recipe(batch=8, gamma=0.01, aux_loss_alpha=0.01)
    (model, loss, by_kind), (other, other_loss, other_by_kind) = one_step(short, recipe), one_step(cut, recipe)
    assert torch.equal(by_kind, other_by_kind) and loss.item() == pytest.approx(other_loss.item())
    for (name, mine), yours in zip(model.named_parameters(), other.parameters()):
        assert torch.allclose(mine, yours, atol=1e-12), name


def test_training_learns_and_a_run_adds_up(few):
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    recipe = Recipe(steps=25, batch=8, lr=1e-2)
    model, run = train(recipe, few, seed=3, progress=False)
    assert torch.equal(torch.random.get_rng_state(), state) and torch.get_num_threads() == threads
    assert run.losses[-5:].mean() < 0.7 * run.losses[0]
    assert run.loads.shape == (25, 2, 32) and run.by_kind.shape == (3, 2, 32, 8)
    assert torch.equal(run.by_kind.sum((0, 3)), run.loads.sum(0))
    held_out_loss, held_out_loads = evaluate(model, few[1])
    assert held_out_loss == run.held_out_loss and torch.equal(held_out_loads, run.held_out_loads)
    assert torch.equal(held_out_loads.sum(-1), 2 * few[1].mask.sum(1, keepdim=True).expand(-1, 2))
    first, _ = model(few[1].tokens[:1])[1]
    assert torch.equal(held_out_loads[0, 0], load(first.indices, 32, few[1].mask[:1]))
    again = train(recipe, few, seed=3, progress=False)[1]
    assert torch.equal(again.loads, run.loads) and torch.equal(again.losses, run.losses)


@pytest.mark.parametrize(
    "fields",
    [{"dense": "wide"}, {"dense": "total", "gamma": 0.1}, {"steps": 0}, {"batch": 6, "micro_batches": 4}, {"micro_batches": 0}],
)
def test_absurd_recipes_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Recipe(**fields)


# --- the stored runs -------------------------------------------------------------------------------------------------


def test_every_setting_is_stored_with_every_seed_and_was_made_by_its_recipe(corpus):
    for name, recipe in SETTINGS.items():
        told = about(path_of(name))
        assert told["recipe"] == dataclasses.asdict(recipe) and told["seeds"] == list(SEEDS)
        assert told["corpus"] == fingerprint(corpus), f"{name} was trained on another text; make runs"
        found = load_runs(name)
        layers = 0 if recipe.dense else 2
        assert len(found) == 3 and all(run.loads.shape == (recipe.steps, layers, 32) for run in found)
        for run in found:
            assert torch.equal(run.by_kind.sum((0, 3)), run.loads.sum(0))


@pytest.mark.parametrize("name", ["no help", "bias 0.01", "sequence-wise loss", "dense, equal total"])
def test_stored_runs_are_rebuilt_in_miniature(name, corpus, tmp_path):
    """The first steps again, by the same code: the same batches, the same loads, the same losses."""
    recipe, stored = SETTINGS[name], load_runs(name)[1]
    short = dataclasses.replace(recipe, steps=3)
    run = train(short, (corpus[0], corpus[1][:8]), seed=SEEDS[1], progress=False)[1]
    assert run.losses[0].item() == pytest.approx(stored.losses[0].item(), rel=1e-4)
    if not recipe.dense:
        moved = (run.loads[0] - stored.loads[0]).abs().sum() / stored.loads[0].sum()
        assert moved < 0.005  # a near tie may fall otherwise on another machine
    save_runs(tmp_path / "one.npz", short, [1], [run], corpus)
    assert about(tmp_path / "one.npz")["recipe"]["steps"] == 3


def test_a_stale_file_is_refused(few, tmp_path):
    recipe = Recipe(steps=2, batch=4)
    run = train(recipe, few, progress=False)[1]
    save_runs(path_of("no help", tmp_path), recipe, [0], [run], few)
    with pytest.raises(ValueError, match="another recipe .* make runs"):
        load_runs("no help", tmp_path)
    with pytest.raises(KeyError, match="no setting .*nothing.*; there are .*no help"):
        load_runs("nothing")


def test_what_is_stored_comes_back_to_the_bit(few, tmp_path, monkeypatch):
    recipe = Recipe(steps=12, batch=4)
    saved = [train(recipe, few, seed=seed, progress=False)[1] for seed in (0, 1)]
    monkeypatch.setitem(SETTINGS, "no help", recipe)
    save_runs(path_of("no help", tmp_path), recipe, [0, 1], saved, few)
    for before, after in zip(saved, load_runs("no help", tmp_path)):
        for field in dataclasses.fields(before):
            old, new = getattr(before, field.name), getattr(after, field.name)
            assert torch.equal(old, new) and old.dtype == new.dtype if isinstance(old, torch.Tensor) else old == new
    huge = dataclasses.replace(saved[0], loads=saved[0].loads + 70_000)
    with pytest.raises(OverflowError, match="loads reaches"):
        save_runs(tmp_path / "huge.npz", recipe, [0], [huge], few)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_on_the_cpu_equals_each_expert_by_itself(dtype, monkeypatch):
    """Small experts take one way and large ones the other; moving the border must not move results by more than rounding."""
    experts, x = GroupedExperts(TOY, dtype=dtype), torch.randn(90, 64, dtype=dtype)
    counts = torch.bincount(torch.arange(90) % 29, minlength=32)  # three without rows
    results = []
    for border in (grouped_module.SMALL, 0):
        monkeypatch.setattr(grouped_module, "SMALL", border)
        rows = x.clone().requires_grad_()
        out = experts(rows, counts)
        grads = torch.autograd.grad(out.float().square().sum(), [rows, *experts.parameters()])
        if border:  # the same way with and without gradients, to the bit
            with torch.no_grad():
                assert torch.equal(experts(x, counts), out)
        results.append([out, *grads])
        with pytest.raises(ValueError, match="counts that sum to 90 for 89 rows"):
            experts(x[1:], counts)
    off = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=off, atol=off)


def test_a_training_shows_how_far_it_is_unless_told_not_to(few, capfd):
    recipe = Recipe(steps=2, batch=4)
    quiet = train(recipe, few, progress=False)[1]
    assert capfd.readouterr().err == ""
    shown = train(recipe, few)[1]
    assert "training" in (told := capfd.readouterr().err) and "0/2" in told
    assert torch.equal(shown.loads, quiet.loads)
