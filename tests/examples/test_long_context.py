"""A language model of long documents: what attends to what, losses in pieces, and all that a run of fields has."""

from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from examples.long_context import data
from examples.long_context.data import PIECE, TOKENIZERS, Settings, TokenSpec, documents, haystack, packed, prepare
from examples.long_context.model import IGNORED, attend_by_blocks, next_tokens, same_document
from examples.long_context.workload import by_context
from upsnb.errors import ConfigError, DataError
from upsnb.memory.predict import predict
from upsnb.report import figures
from upsnb.runs import handle
from upsnb.training import compiling
from upsnb.training.parallel import Ranks
from upsnb.training.setup import Setup

EXAMPLE = "long_context"


def chunk(*lengths: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens of documents so long, and whose each is, (1, N)."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    return torch.randint(400, owner.shape, generator=torch.Generator().manual_seed(seed)), owner.int()


# -- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["The owl of Alin.", "  Größe\n\tÜ\u4f60\U0001f989 x_1", "", next(documents(3))])
def test_any_text_comes_back_from_its_tokens(kind, text):
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    made = TOKENIZERS[kind].learned(iter([next(documents(0))]), 400)
    loaded = TOKENIZERS[kind].loaded(made.saved())
    tokens = made.encode(text)
    assert loaded.encode(text) == tokens and loaded.decode(tokens) == text
    assert all(0 <= token < 400 and token != made.end for token in tokens)


def test_chunks_hold_every_token_once_as_a_target_and_know_its_document():
    lengths = [5, 1, 40, 17, 3, 90]
    stream = [[number] * length for number, length in enumerate(lengths)]
    tokens, owners = np.stack(list(packed(iter(stream), context=16))).swapaxes(0, 1)
    flat = sum(stream, [])
    assert tokens[:, 1:].ravel().tolist() == flat[1 : 1 + 16 * len(tokens)]
    assert (tokens[1:, 0] == tokens[:-1, -1]).all() and len(tokens) == (len(flat) - 1) // 16
    assert (owners[:, 0] == 0).all()
    for row, owner in zip(tokens, owners):  # here a token is its document's number
        assert (owner == row - row[0]).all()


def test_no_document_of_a_text_is_in_two_splits(tmp_path):
    text = data.DOCUMENT_END.join(f"{number} " * 40 for number in range(300, 420))
    (tmp_path / "text.txt").write_text(text)
    settings = Settings(context=32, vocabulary=400, files=("*.txt",))
    place = prepare(settings, (0.2, 0.2), tmp_path, tmp_path / "data", lambda message: None)
    corpus, seen = data.opened(TokenSpec("text", 32, 400), place), {}
    numbers = {corpus.tokenizer.numbers.get(f" {n}", -1) for n in range(300, 420)}
    for split, samples in corpus.splits.items():
        seen[split] = set(corpus.chunks(samples)[0].ravel().tolist()) & numbers
        assert len(seen[split]) > 5
    assert not (seen["train"] & seen["test"] or seen["train"] & seen["validation"] or seen["validation"] & seen["test"])


def test_files_that_are_not_there_and_settings_that_nobody_knows_are_refused(config, tmp_path):
    (tmp_path / "one.txt").write_text("one document " * 300)
    for files, said in (
        (("one.txt", "nowhere.txt"), "files: nowhere.txt not found"),
        (("*.txt",), "for .* -> give more"),
    ):
        with pytest.raises(DataError, match=said):
            prepare(Settings(context=64, files=files), (0.1, 0.1), tmp_path, tmp_path / "data", lambda message: None)
    assert not list((tmp_path / "data").iterdir()), "nothing unfinished is left"
    with pytest.raises(ConfigError, match="contxt: Extra inputs are not permitted -> the settings are context"):
        predict(config(**{"data.workload_settings.contxt": 3}))
    with pytest.raises(
        ConfigError, match="model.settings.depth: Extra inputs are not permitted -> .* size, theta, chunk"
    ):
        predict(config(**{"model.settings.depth": 3}))
    with pytest.raises(ConfigError, match="flash takes no mask"):
        Setup.build(config(**{"operator.pdet.attention": "flash"}), tmp_path, Ranks(), lambda message: None)
    with pytest.raises(ConfigError, match="is a stage of fields"):
        config(**{"stages.finetune.epochs": 1})


def test_a_text_that_comes_twice_or_grows_keeps_its_documents_in_their_splits(tmp_path):
    """A run that goes on with more text must not test what it has trained on."""
    about = [f"{number} " * 40 for number in range(300, 400)]
    split = (0.2, 0.2)
    where = {text: data.split_of(text, 0, split) for text in about}
    assert {*where.values()} == {"train", "validation", "test"}
    (tmp_path / "a.txt").write_text(data.DOCUMENT_END.join(about))
    settings = Settings(context=32, vocabulary=400, files=("a.txt", "*.txt", str(tmp_path / "a.txt")))
    assert data.text_files(settings, tmp_path) == [tmp_path / "a.txt"]
    place = prepare(settings, split, tmp_path, tmp_path / "data", lambda message: None)
    first = data.opened(TokenSpec("text", 32, 400), place)
    (tmp_path / "a.txt").touch()
    again = prepare(settings, split, tmp_path, tmp_path / "data", lambda message: None)
    assert again != place and data.opened(TokenSpec("text", 32, 400), again).about == first.about
    (tmp_path / "a.txt").write_text(data.DOCUMENT_END.join(["more", *about]))
    more = prepare(settings, split, tmp_path, tmp_path / "data", lambda message: None)
    assert data.opened(TokenSpec("text", 32, 400), more).about != first.about


def test_documents_are_as_long_as_the_context_they_are_for():
    """What is farther away than any document is long would never be looked for."""
    longest = max(len(PIECE.findall(text)) for text in islice(documents(0, 32_768), 40))
    assert longest > 20_000


@pytest.mark.parametrize("words", ["names are none of its words", "a few words"])
def test_a_run_on_own_text_is_evaluated_whatever_its_words_are(config, train_here, tmp_path, words):
    """A needle of names that are spelt in bytes is five times as long, and may be no question at all."""
    text = tmp_path / "own.txt"
    text.write_text(data.DOCUMENT_END.join(f"{words} {number} " * 30 for number in range(200)))
    given = {"files": [str(text)], "needles": 3, "context": 96}
    folder = tmp_path / "run"
    events = train_here(config(**{"data.workload_settings": given}), folder)
    (found,) = figures.read_evaluation(folder, events)["datasets"]["text"].values()
    assert found["error"] > 1 and "needles_right" not in found
    drawn = figures.RunFigures.of(handle.Run.attach(folder)).all()
    assert "perplexity_text" in drawn and drawn["perplexity_text"]()


def test_a_question_has_one_answer_in_its_haystack():
    tokenizer = TOKENIZERS["words"].learned(documents(0), 400)
    for number, depth in enumerate((0.0, 0.5, 1.0)):
        tokens, choices = haystack(tokenizer, 500, depth, np.random.default_rng(number), 8)
        text = tokenizer.decode(tokens)
        *_, question = text.split()
        told = [text[at:] for at in range(len(text)) if text.startswith(question, at)]
        assert len(tokens) <= 500 and len(set(choices)) == 8 and len(told) == 2, "said once, asked once"
        assert told[0].startswith(question + tokenizer.decode(choices[:1]))
        assert abs(text.index(question) / len(text) - depth) < 0.15


# -- model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_nothing_of_a_document_reaches_another_one_nor_its_own_past(setup, backend):
    model = setup(**{"operator.pdet.attention": backend}).model.train()
    tokens, owner = chunk(20, 30, 25)
    changed = tokens.clone()
    changed[0, 35] = (tokens[0, 35] + 7) % 400
    with torch.no_grad():
        before, after = (model(some, owner) for some in (tokens, changed))
    moved = (before != after).any(-1)[0].nonzero().ravel().tolist()
    assert moved == list(range(35, 50))


@pytest.mark.parametrize("queries", [16, 25, 300])
def test_attention_in_blocks_of_queries_is_attention_under_the_whole_mask(monkeypatch, queries):
    monkeypatch.setattr("examples.long_context.model.QUERIES", queries)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 75, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    _, owner = chunk(20, 30, 25)
    expected = F.scaled_dot_product_attention(q, k, v, same_document(owner))
    found = attend_by_blocks(q, k, v, owner)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(y, (q, k, v), upstream) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_document_is_read_the_same_wherever_it_lies_in_a_chunk(setup):
    model = setup().model.eval()
    tokens, owner = chunk(20, 30, 25)
    alone = model(tokens[:, 20:50], owner[:, :30] * 0)
    assert torch.allclose(model(tokens, owner)[:, 20:50], alone, atol=1e-4)
    assert torch.allclose(model.head(model.hidden(tokens[:, 20:50])), alone, atol=1e-4), "no mask is needed for one"


def test_a_chunk_is_evaluated_document_by_document_as_it_is_as_a_whole(setup):
    made = setup()
    (corpus,) = made.datasets.values()
    sample = next(n for n in range(40) if corpus.chunks(np.array([n]))[1].max() > 0)
    model = made.model.eval()
    tokens, owner, targets = next_tokens(*corpus.chunks(np.array([sample])))
    with torch.no_grad():
        whole = float(model.head(model.hidden(tokens, owner), targets, mean=False).sum())
        losses, counts, _ = by_context(model, corpus, sample, corpus.unigram(), "cpu")
    assert losses.sum() == pytest.approx(whole, rel=1e-5) and counts.sum() == (targets != IGNORED).sum()


def test_the_first_token_of_a_document_is_nobodys_target():
    tokens, owner = chunk(3, 4, 2)
    read, of, targets = next_tokens(tokens, owner)
    assert read.tolist() == tokens[:, :-1].tolist() and of.tolist() == owner[:, :-1].tolist()
    assert (targets == IGNORED).nonzero()[:, 1].tolist() == [2, 6]
    assert targets[0, [0, 1, 3, 4, 5, 7]].tolist() == tokens[0, [1, 2, 4, 5, 6, 8]].tolist()


@pytest.mark.parametrize("size", [7, 64, 10_000])
def test_loss_in_pieces_is_the_plain_one_and_so_are_its_gradients(setup, size):
    model = setup(**{"model.settings": {"chunk": size}}).model
    tokens, owner = chunk(30, 45, seed=1)
    read, of, targets = next_tokens(tokens, owner)
    losses = (
        lambda: model.head(model.hidden(read, of), targets),
        lambda: F.cross_entropy(model(read, of).flatten(0, 1), targets.flatten(), ignore_index=IGNORED),
    )
    found = []
    for loss in losses:
        model.zero_grad()
        value = loss()
        value.backward()
        found.append((value, [parameter.grad.clone() for parameter in model.parameters()]))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-5)
    for ours, plain in zip(found[0][1], found[1][1]):
        assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-6)


# -- training ------------------------------------------------------------------------------------------------------


def test_it_learns_more_than_how_often_each_token_is_said(setup):
    trained = setup(**{"data.workload_settings.chunks": 200})
    unigram, losses, least = trained.datasets["text"].unigram(), [], []
    batches = (batch for epoch in range(9) for batch in trained.loader.epoch(epoch))
    for step, batch in zip(range(60), batches):
        trained.set_learning_rate(min(1, step / 10) * 0.02 + 0.02)
        losses.append(float(trained.step([batch], step)[0]))
        targets = next_tokens(batch.tokens, batch.documents)[2]
        least.append(-unigram[targets[targets != IGNORED].numpy()].mean())
    assert np.mean(losses[-8:]) < 0.8 * np.mean(least[-8:]), (losses[-8:], least[-8:])


def test_a_loss_at_some_positions_is_on_average_that_of_all(setup):
    some = setup(**{"training.query_sampling.num_queries": 24})
    (batch,), objective = some.loader.peek(), some.objective
    with torch.no_grad():
        values = []
        for seed in range(60):
            batch.seed = seed
            values.append(float(objective(batch, {"cross_entropy": 1.0}, None)[0]))
        objective.config = some.config.training.model_copy(
            update={"query_sampling": type(some.config.training.query_sampling)()}
        )
        whole = float(objective(batch, {"cross_entropy": 1.0}, None)[0])
    error = np.std(values) / 60**0.5
    assert error > 0 and abs(np.mean(values) - whole) < 4 * error


@pytest.mark.slow
def test_blocks_are_one_graph_and_compiling_changes_no_loss(setup, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")  # all of the compiler but its code generation
    torch._dynamo.reset()
    counter, losses = compiling.CompileCounter(), []
    for on in (False, True):
        made = setup(**{"training.compile": on})
        losses.append(made.step(made.loader.peek(), 0)[0])
    found = counter.read()
    assert torch.allclose(*losses, rtol=1e-5)
    assert (found.graphs, found.graph_breaks, found.recompiles) == (1, 0, 0), found
    torch._dynamo.reset()
