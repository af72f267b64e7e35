"""Answers `vlens patch`: each prompt as it is and patched, in one batch, or a sweep over patches of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from vlens_cli import __version__
from vlens_cli.driver import boot, targets
from vlens_cli.driver.base import LOGITS, Request, Result, Want
from vlens_cli.driver.capture import token_rows
from vlens_cli.driver.edits import Edited, Plan, check_memory
from vlens_cli.driver.targets import Target
from vlens_cli.driver.tokens import Fed
from vlens_cli.errors import UsageError
from vlens_cli.query import SCHEMA_VERSION, PatchQuery, Reply, Saved

if TYPE_CHECKING:
    import torch

    from vlens_cli.driver.effect import Metric
    from vlens_cli.driver.readout import TextOf
    from vlens_cli.driver.session import Progress, Session


def answer(session: Session, query: PatchQuery, progress: Progress, into: BinaryIO | None) -> Reply:
    """Raises UsageError before any engine starts, StartError, QueryError."""
    fed = session.feed(query.prompts, query.bos, query.one_chunk)
    for one in fed:
        boot.check_tokens(one.ids, session.catalog.dims.d_vocab, session.plan, query.max_new_tokens)
    asked = targets.resolve(query.targets, session.tokens, session.catalog.dims.d_vocab, query.target_prefix)
    plan = Plan(session, query.interventions, fed, query.bos, query.max_new_tokens)
    if query.sweep:
        from vlens_cli.driver import sweep

        return sweep.answer(session, query, fed, asked, plan, progress, into)
    return _compare(session, query, fed, asked, plan, progress, into)


def last(fed: Fed) -> dict[str, Want]:
    """The logits that follow the prompt."""
    return {LOGITS: Want((len(fed.ids) - 1,))}


def beyond(edited: Edited, fed: Sequence[Fed]) -> list[str]:
    """A note where every edit of a prompt is on generated positions, which nothing that is measured comes after."""
    found = [n for n, (edits, f) in enumerate(zip(edited.edits, fed, strict=True))
             if edits and all(edit.positions and min(edit.positions) >= len(f.ids) for edit in edits)]
    if not found:
        return []
    of = "" if len(found) == len(fed) else f" of prompt {', '.join(map(str, found))}"
    return [f"every edit{of} is on generated positions: logits, targets and KL are those after the last prompt token, "
            "which they come after; compare the continuations"]


def row_of(result: Result) -> torch.Tensor:
    """What `last` captured: [d_vocab]."""
    return result.captured[LOGITS].value[-1]


def _compare(session: Session, query: PatchQuery, fed: Sequence[Fed], asked: Sequence[Target], plan: Plan,
             progress: Progress, into: BinaryIO | None) -> Reply:
    if not plan.steps:
        raise UsageError("nothing is patched: no intervention is given", code="no_intervention",
                         hint="-i 'blocks.8.hook_resid_post[pos=3] = @source', or --sweep layer,pos --hook ...")
    from vlens_cli.driver import effect

    metric = effect.metric(query.metric, asked, bool(plan.sources)) if query.metric else None
    check_memory(session, [*fed, *fed], [last(f) for f in (*fed, *fed)])
    wanted = plan.source_requests(also=last)
    sources, seconds = session.run(wanted, progress) if wanted else ([], 0.0)
    edited = plan.edited(sources)
    requests = [Request(f.ids, last(f), query.max_new_tokens, edits)
                for f, patched in zip(fed, edited.edits, strict=True) for edits in ((), patched)]
    results, more = session.run(requests, progress)
    prompts, kept = [], []
    spaced = targets.spaced(asked, session.tokens)
    for n, f in enumerate(fed):
        base, patched = results[2 * n : 2 * n + 2]
        source = sources[plan.source_of(n)] if sources else None
        runs = {"base": base, "patched": patched} | ({"source": source} if source else {})
        kept.append(runs)
        prompts.append({
            "text": f.text, "chunks": patched.chunks - query.max_new_tokens + 1, "tokens": token_rows(f),
            "edits": edited.body(patched.fired),
            **{name: run_body(session, query, run, name != "source") for name, run in runs.items()},
            **({"source_tokens": token_rows(plan.sources[plan.source_of(n)])} if source else {}),
            "effect": _effect({name: row_of(run) for name, run in runs.items()}, asked, metric),
        })
    notes = (*session.plan.notes, *(note for f in fed for note in f.notes), *edited.notes, *beyond(edited, fed),
             *(note for runs in kept for note in targets.notes(spaced, row_of(runs["base"]))))
    body = head(session) | {"prompts": prompts, "seconds": {"forward": round(seconds + more, 6)}}
    saved = None if into is None else _save(session, query, fed, kept, prompts, into)
    return Reply(body, tuple(dict.fromkeys(notes)), saved)


def _save(session: Session, query: PatchQuery, fed: Sequence[Fed], kept: Sequence[dict[str, Result]],
          prompts: Sequence[dict[str, Any]], into: BinaryIO) -> Saved:
    """The file of `-o`: of each run `RUN/logits` [d_vocab] after the last prompt token, and `RUN/new_tokens` where more
    than one was generated; after `N/` where there are several prompts."""
    import torch

    from vlens_cli.driver import blob

    tensors: dict[str, torch.Tensor] = {}
    for n, runs in enumerate(kept):
        for name, run in runs.items():
            key = name if len(kept) == 1 else f"{n}/{name}"
            tensors[f"{key}/logits"] = row_of(run).cpu().contiguous()
            if len(run.new_tokens) > 1 and name != "source":
                tensors[f"{key}/new_tokens"] = torch.tensor(run.new_tokens)
    origin = blob.origin(session.spec, session.plan.dtype, session.catalog, fed, [p["chunks"] for p in prompts])
    metadata = origin | {
        "axes": {"logits": ["d_vocab"], "new_tokens": ["step"]}, "positions": [len(f.ids) - 1 for f in fed],
        "hooks": {"logits": session.catalog.definition(LOGITS)}, "edits": prompts[0]["edits"],
        "interventions": list(query.interventions.expressions), "effect": [p["effect"] for p in prompts],
    }
    return blob.write_safetensors(into, tensors, blob.texts(metadata))


def head(session: Session) -> dict[str, Any]:
    """What every reply of `vlens patch` begins with."""
    return {"schema_version": SCHEMA_VERSION, "command": "patch", "vlens": __version__, "model": session.model_body()}


def run_body(session: Session, query: PatchQuery, run: Result, continued: bool) -> dict[str, Any]:
    """One run: `top` tokens after the prompt, the entropy, and its continuation; `ended` is the place in it of the first
    token that would end it, since generation goes on behind that, for both runs to be of one length."""
    text_of = session.tokens.text_of
    body = _entry(row_of(run), (), query.top, text_of)
    if continued:
        body["new_tokens"] = [{"id": i, "text": text_of(i)} for i in run.new_tokens]
        body["text"] = session.tokens.decode(run.new_tokens)
        body["ended"] = session.tokens.ended(run.new_tokens)
    return body


def _effect(rows: dict[str, torch.Tensor], asked: Sequence[Target], metric: Metric | None) -> dict[str, Any]:
    """What the patch does to the logits [d_vocab] after the prompt, of the runs base, patched and, if there, source."""
    from vlens_cli.driver import effect

    places = {name: _places(row, [target.id for target in asked]) for name, row in rows.items()}
    found: dict[str, Any] = {
        "kl": effect.kl(rows["base"], rows["patched"]),
        "targets": [target.body() | {name: place[n] for name, place in places.items()}
                    | _change(effect.Metric("recovery", (target.id,)), rows) for n, target in enumerate(asked)],
    }
    if len(asked) > 1:
        difference = effect.Metric("recovery", (asked[0].id, asked[1].id))
        found["logit_diff"] = {name: difference.of_whole(row) for name, row in rows.items()} | _change(difference, rows)
    if metric is not None:
        raw = {name: metric.of_whole(row) for name, row in rows.items()}
        value = {name: metric.value(x, raw["base"], raw.get("source")) for name, x in raw.items()}
        found["metric"] = {"name": metric.name, **value}
    return found


def _entry(row: torch.Tensor, ids: Sequence[int], top: int = 1, text_of: TextOf = lambda token: None) -> dict[str, Any]:
    """A row of logits [d_vocab] as `vlens logits` gives it, but for its position."""
    from vlens_cli.driver import readout

    (entry,) = readout.entries(readout.distribution(row[None]), [0], top, ids, text_of)
    return {key: value for key, value in entry.items() if key != "pos"}


def _places(row: torch.Tensor, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Where each token stands: logit, prob, logprob, rank."""
    found = _entry(row, ids)["targets"] if ids else []
    return [{key: value for key, value in entry.items() if key not in ("id", "text")} for entry in found]


def _change(recovery: Metric, rows: dict[str, torch.Tensor]) -> dict[str, Any]:
    """By how much a logit (or the difference of two) changes, and how far that is on the way from base to source."""
    raw = {name: recovery.of_whole(row) for name, row in rows.items()}
    return {"change": raw["patched"] - raw["base"],
            "recovery": recovery.value(raw["patched"], raw["base"], raw.get("source"))}
