"""Speculation: starts drafting jobs, queues speculative tokens, and issues the best while there is
    room.

    accepted tokens -- frontier          the tree's root (`Tree.frontier`)
                          +-- a -- b      issued: in flight, `run_id` says in which run
                          |    +-- c      planned: waits in `Lane.reserve`, best first
                          |    |   +-- ?   leaf: a drafting job may ask for what follows c
                          +-- d           planned as an alternative of a

A result moves the frontier and drops all other branches (`missed`). Proposals of a job become
planned nodes (`drafted`), the best of these become a run (`speculate`), and the best leaf gets the
next job (`ask_draft`). A leaf without proposals is not queried again before a further result is
back (`Lane.empty`, `result_back`).

This is the drafting half of the scheduler. It cannot change a token: speculative tokens are
accepted only by the walk (`scheduler`). An inline proposer, which uses the target's own rows, is
queried first. Where it proposes nothing, the draft in its thread gets a job. Independent of clocks,
threads and models.
"""

from __future__ import annotations

import math

from msgspec import structs

from pipeinfer.core.calibration import Calibration
from pipeinfer.core.control import DraftStop
from pipeinfer.core.drafting import ENOUGH, Prefix, Proposal, StartDraft
from pipeinfer.core.messages import NO_RUN
from pipeinfer.core.policy import Ablation, Policy
from pipeinfer.scheduler.guess_queue import probability
from pipeinfer.scheduler.hint_rows import HintRows
from pipeinfer.scheduler.lanes import Lane
from pipeinfer.scheduler.published import buffer_free, reads_prompt
from pipeinfer.scheduler.settings import Limits, row_price
from pipeinfer.scheduler.state import SchedulerState
from pipeinfer.scheduler.token_tree import PLANNED, Node
from pipeinfer.scheduler.worth import LOSS, Account
from pipeinfer.strategies.proposers.base import InlineProposer

_MOST_JOBS = 2  #: drafting jobs at a time; the draft executes them one after the other
_READING = 0.06  #: share of the time that a resting draft may take to read what it has missed
_MOST_ASKED = 8  #: leaves per event and lane at which an inline proposer is queried


class Speculation:
    """Starts drafting jobs and issues speculative tokens; see the module docstring.

    state: lanes and runs, shared with the scheduler
    rows: the inline proposer, if any
    drafts: whether drafting jobs can be executed
    """

    def __init__(
        self, state: SchedulerState, rows: InlineProposer | None = None, *, drafts: bool = True
    ) -> None:
        self.state = state
        self.hints = None if rows is None else HintRows(rows)
        self._drafts = drafts
        self.calibration = Calibration()
        self.worth = Account()
        self._next_job = 0

    @property
    def limits(self) -> Limits:
        """The settings in use."""
        return self.state.limits

    def warm_up(self, lane: Lane, base: int = 0) -> None:
        """Start a job that prefills the draft's cache with the prompt while the stages prefill.

        base: up to how many of its tokens; 0: all
        """
        if self._drafts and self.limits.speculates and self.limits.path_min <= 1.0 and \
                self.limits.asks_models and len(self.state.lanes) == 1:
            job = self._job(lane, (), max_tokens=0, max_depth=0)
            lane.warm_up = structs.replace(job, base=lane.in_text(base)) if base else job
            self.state.emit(lane.warm_up)

    def result_back(self, lane: Lane) -> None:
        """Note that a result is back: places without proposals may be queried again."""
        if self.hints is not None:
            self.hints.back(lane)
        for node in lane.empty:
            node.ranked = False
            lane.reserve.add_leaf(node)
        lane.empty.clear()

    def drop(self, lane: Lane) -> None:
        """Drop the lane's waiting speculative tokens and stop its drafting jobs."""
        lane.reserve.clear()
        lane.empty.clear()
        self.drop_job(lane)

    def missed(self, lane: Lane, tip: Node) -> bool:
        """Drop all speculation after a miss; return whether `tip` waits for speculative tokens to
        join it.

        tip: the accepted token to issue next
        """
        self.drop(lane)
        # a cutoff of 1 or above admits no speculative token
        hopeful = self.limits.policy is Policy.SPECULATIVE or self.limits.path_min < 1.0
        quick = self.hints is not None
        if (self.limits.joins or quick) and hopeful and self.may_guess(lane) \
                and self._depth_left(lane, tip) > 0:
            lane.waiting_tip = tip
            return True
        lane.reserve.add_leaf(tip)
        return False

    def drafted(self, job_id: int, proposals: tuple[Proposal, ...], rows: int = 0) -> None:
        """Add the proposals of a drafting job to the lane. rows: as in `Drafted`"""
        lane = next((lane for lane in self.state.lanes.values()
                     if lane.job and lane.job.job_id == job_id), None)
        if lane is None or lane.job is None or lane.job_node is None:
            return
        node, lane.job, lane.job_node = lane.job_node, None, None
        lane.stats.drafted += sum(not proposal.alternative for proposal in proposals)
        if rows and self.limits.draft_price:  # the rows of the path were evaluated in one pass
            self.worth.went(-min(rows, len(proposals) + 1) * self.limits.draft_price)
        planned = self._plan(lane, node, proposals)
        if node is lane.waiting_tip:
            limits = self.limits
            self._issue_tree(lane, node, planned, max(limits.tree_max, limits.free_max)
                             if limits.synchronous else limits.draft_max)
            return
        node.ranked = True
        lane.reserve.add(planned)
        if not proposals:
            self._note_empty(lane, node)

    def _plan(self, lane: Lane, tip: Node, proposals: tuple[Proposal, ...]) -> list[Node]:
        """Nodes for proposals, with calibrated confidences."""
        estimate = self.calibration.estimate
        nodes = lane.tree.plan(
            tip,
            [
                Proposal(
                    p.parent,
                    p.token,
                    estimate(p.confidence, first=not p.alternative, depth=p.depth),
                    p.alternative,
                    p.paid,
                )
                for p in proposals
            ],
            self._alternative_weight(),
        )
        for node, proposal in zip(nodes, proposals, strict=True):
            assert node.parent is not None
            node.parent.ranked = True
            node.parent.guesses.append(proposal)
        return nodes

    def _note_empty(self, lane: Lane, node: Node) -> None:
        """Handle an empty draft: wait for a result, or try again with a lower cutoff."""
        lane.empty_since_accept += 1
        lane.stats.empty_drafts += 1
        if self.limits.p_decay > 0.0 and self._cutoff(lane) > 0.0:
            node.ranked = False
            lane.reserve.add_leaf(node)
        else:
            lane.empty.append(node)

    def learn(self, node: Node, token: int) -> None:
        """Record the target's choice after `node` in the calibration, for issued and unissued
        proposals.
        """
        guesses = node.guesses
        right = node.child(token)
        if right is not None and right.paid:
            self.worth.add(1.0)
        for guess in guesses:
            self.calibration.learn(guess.confidence, guess.token == token,
                                   first=not guess.alternative, depth=guess.depth)
        if guesses and guesses[0].token != token:  # an alternative that is not named does not help
            self.calibration.learn_second(len(guesses) > 1 and guesses[1].token == token)

    def drop_job(self, lane: Lane) -> None:
        """Stop the lane's drafting job."""
        if lane.job is not None:
            self.state.emit(DraftStop(lane.job.job_id))
            lane.job = lane.job_node = None
        if lane.done and self.hints is not None:
            self.hints.closed(lane)

    def room_to_guess(self) -> bool:
        """Return whether the requests' accepted tokens leave stages idle."""
        if self.limits.alone or len(self.state.lanes) <= 1:
            return True
        lanes = self.state.decoding
        own = self.state.plain + len(self.state.tips)
        runs = max(-(-lanes // self.limits.group(lanes)), own)
        credit = self.limits.credit
        return runs < credit - 1 and runs + self.state.chunks < credit

    def may_guess(self, lane: Lane) -> bool:
        """Return whether speculation is possible in this lane now."""
        return self.limits.speculates and not (lane.done or lane.closing) and lane.root_issued \
            and self.room_to_guess() and not (self.limits.buffered and reads_prompt(lane))

    def speculate(self) -> None:
        """Issue the best speculative tokens of all lanes while there is room (docs/algorithms.md
        4.3).
        """
        limits = self.limits
        if limits.synchronous or not limits.speculates or not self.room_to_guess():
            return
        self._guess(limits)
        self._hint()

    def _guess(self, limits: Limits) -> None:
        alone = Ablation.CONTINUOUS in limits.ablations
        most = min(limits.tree_max if alone else limits.draft_max, limits.exact_width)
        open_lanes = {lane.lane: lane for lane in self.state.lanes.values()}
        while open_lanes:
            if limits.guess_rows and self.state.guess_rows + most > limits.guess_rows \
                    and self.state.guess_rows:
                return
            chances = {k: self._chance(lane) for k, lane in open_lanes.items()}
            best = max(chances, key=lambda k: chances[k])
            lane = open_lanes[best]
            if chances[best] <= 0.0:
                return
            count, above = most, lane.reserve.best()
            while above is not None and above.run_id == PLANNED:
                above = above.parent
            if above is not None:
                count = min(most, lane.tree.rows_left(above, limits.exact_width))
            taken = lane.reserve.take(count, self.state.pool.available, self._floor(lane),
                                      chain=limits.states or limits.chains,
                                      base=above if limits.buffered else None)
            asked = self.hints.plan_below(lane, taken, limits.exact_width - len(taken),
                                          self._last_pos) \
                if taken and self.hints is not None and self.hints.proposer.chained else []
            nodes = lane.tree.issue([*taken, *asked], self.state.next_run)
            if not nodes:
                del open_lanes[best]
                continue
            assert nodes[0].parent is not None
            rows = [*lane.tree.repeated(nodes), *nodes]
            run = self.state.send([(lane, node) for node in rows], nodes[0].parent.run_id,
                                  speculative=True)
            if asked and self.hints is not None:
                self.hints.sent(lane, run)
            lane.runs_since_accept += 1

    def _hint(self) -> None:
        """Issue hint rows below frontiers whose run is in flight without them, if there is room.

        These are frontiers that were speculative, or whose hints never fit into the run of a tip.
        """
        if self.hints is None:
            return
        apart = self.hints.proposer.rows >= self.limits.exact_width
        for lane in self.state.lanes.values():
            tip = lane.tree.frontier
            if self.state.useful + self._drafts >= self.limits.credit:
                return
            if self.may_guess(lane) and (apart or tip.speculative) and self.hints.due(lane) \
                    and not (lane.unsent or lane.waiting_tip or tip.choice):
                self.hints.send(lane, self.hints.plan(lane, [tip], self._last_pos), self.state)

    @property
    def _last_pos(self) -> int:
        """The highest position of a row."""
        return self.limits.n_ctx - 1

    def _floor(self, lane: Lane) -> float:
        """The least priority of a token that is issued."""
        return lane.tree.frontier.score + math.log(max(self.limits.path_min, 1e-12))

    def _chance(self, lane: Lane) -> float:
        """The probability of the token that this lane would issue next; 0 when it should issue
        none.
        """
        limits, frontier = self.limits, lane.tree.frontier
        if lane.unsent or not self.may_guess(lane):
            return 0.0
        if (lane.useful if limits.alone else self.state.useful) >= limits.credit:
            return 0.0
        if Ablation.CONTINUOUS in limits.ablations and any(
                run.guesses and run.useful and lane in run.owners
                for run in self.state.runs.values()):
            return 0.0
        best = lane.reserve.best()
        if best is None or best.priority < self._floor(lane) \
                or not buffer_free(self.state, lane, best):
            return 0.0
        chance = probability(best.priority, frontier)
        if lane.job_node is not None and not limits.eager and \
                self._promise(lane.job_node, frontier) > chance:
            return 0.0
        return chance

    def _alternative_weight(self) -> float:
        """The gain of an accepted alternative relative to that of an accepted first proposal.

        Nothing is drafted below an alternative, so the pipeline has to be filled again after it. It
        gains one slot, and where the next speculative token is wrong, the result is known a whole
        latency earlier.
        """
        return min(1.0, 1.0 - self.calibration.acceptance + 1.0 / max(self.limits.credit, 1))

    def _promise(self, leaf: Node, frontier: Node) -> float:
        """The expected probability of acceptance of the best proposal below a leaf."""
        return probability(leaf.score, frontier) * self.calibration.acceptance

    def _wanted_leaf(self, lane: Lane) -> Node | None:
        """The leaf where a draft would gain most; None when no leaf is worth a job."""
        limits, frontier = self.limits, lane.tree.frontier
        if self._cutoff(lane) >= 1.0:
            return None
        leaf = lane.reserve.best_leaf()
        while leaf is not None and self._depth_left(lane, leaf) <= 0:
            leaf.ranked = True
            leaf = lane.reserve.best_leaf()
        if leaf is None or probability(leaf.score, frontier) < limits.path_min:
            return None
        best = lane.reserve.best()
        if best is not None and \
                probability(best.priority, frontier) > self._promise(leaf, frontier):
            return None  # issue the better token first; the leaf may be the best one after that
        return leaf

    def ask_draft(self) -> None:
        """Start drafting jobs: below tokens that wait for one, then where the expected gain is
        largest.
        """
        if not self.limits.speculates:
            return
        for lane in self.state.lanes.values():
            if lane.waiting_tip is not None:
                self._start_draft(lane, lane.waiting_tip)
        if self.limits.synchronous or not self.room_to_guess():
            return
        self._ask_rows()
        if not self._drafts:
            return
        jobs = sum(lane.job is not None for lane in self.state.lanes.values())
        wanted = []
        for lane in self.state.lanes.values():
            if lane.job is None and self.may_guess(lane) and \
                    (leaf := self._wanted_leaf(lane)) is not None:
                wanted.append((-self._promise(leaf, lane.tree.frontier), lane.lane, lane, leaf))
        for _, _, lane, leaf in sorted(wanted, key=lambda entry: entry[:2])[
                :max(_MOST_JOBS - jobs, 0)]:
            self._start_draft(lane, leaf)

    def _ask_rows(self) -> None:
        """Query the inline proposer below the best leaves."""
        if self.hints is None:
            return
        found = self.hints.proposer.chained  # candidates that did not fit into a tip's run
        for lane in self.state.lanes.values():
            if self.hints.proposer.chained and self.hints.fresh(lane):
                found |= self._go_on(lane)
            for _ in range(_MOST_ASKED):
                leaf = self._wanted_leaf(lane) if self.may_guess(lane) else None
                if leaf is None or lane.job is not None:
                    break
                planned = self._quick(lane, leaf)
                if planned:
                    found = True
                    lane.reserve.add(planned)
                elif self._drafts:
                    break
                else:
                    leaf.ranked = True
                    self._note_empty(lane, leaf)
        if found:
            self.speculate()

    def _go_on(self, lane: Lane) -> bool:
        """Query the inline proposer after new results, while speculative tokens are in flight.

        What it proposes beyond the nodes that exist joins the queue. Returns whether there was any.
        """
        assert self.hints is not None
        tip = lane.tree.frontier
        if not (self.may_guess(lane) and tip.open) or lane.unsent or lane.waiting_tip is not None:
            return False
        depth = self._depth_left(lane, tip)
        proposals = self.hints.propose(lane, self._job(lane, (), self.limits.exact_width, depth)) \
            if depth > 0 else ()
        if self._drafts and proposals and ENOUGH > self.calibration.estimate(
                proposals[0].confidence, first=True):
            return False  # the draft may propose a better token
        planned: list[Node] = []
        where: list[Node | None] = []  # the node of each proposal; None below a decided one
        for one in proposals:
            parent = tip if one.parent < 0 else where[one.parent]
            known = None
            if parent is not None and parent.open:
                known = parent.child(one.token) or lane.reserve.child(parent, one.token) or next(
                    (node for node in planned if node.parent is parent and node.token == one.token),
                    None)
                if known is None:
                    (known,) = self._plan(lane, parent, (structs.replace(one, parent=-1),))
                    planned.append(known)
            where.append(known)
        lane.stats.drafted += len(planned)
        lane.reserve.add(planned)
        return bool(planned)

    def _quick(self, lane: Lane, node: Node) -> list[Node]:
        """Planned nodes for the inline proposer's proposals below `node`.

        Empty where its confidence is low and there is a draft.
        """
        assert self.hints is not None
        room = self.limits.exact_width - (node is lane.waiting_tip)
        suffix = tuple(node.path_from(lane.tree.frontier))
        spread = self.hints.proposer.chained and not self.limits.synchronous
        job = self._job(lane, suffix, room if spread else
                        min(self.hints.proposer.candidates, room),
                        self._depth_left(lane, node))
        proposals = self.hints.propose(lane, job)
        if self._drafts and proposals and ENOUGH > self.calibration.estimate(
                proposals[0].confidence, first=True):
            return []
        lane.stats.drafted += sum(not proposal.alternative for proposal in proposals)
        return self._plan(lane, node, proposals)

    def _start_draft(self, lane: Lane, node: Node) -> None:
        if lane.job is not None:
            return
        if self.hints is not None and node is lane.waiting_tip:
            if self.limits.synchronous and self.hints.out(lane):
                return  # hints of the last token are still in flight
            planned = self._quick(lane, node)
            if planned or not (self._drafts and self.limits.joins):
                self._issue_tree(lane, node, planned,
                                 min(len(planned), self.hints.proposer.candidates))
                return
        single = self.limits.synchronous or Ablation.CONTINUOUS in self.limits.ablations
        room = self.limits.exact_width - (node is lane.waiting_tip)
        size = min(self.limits.tree_max if single else self.limits.draft_max, room)
        suffix = tuple(node.path_from(lane.tree.frontier))
        lane.job = self._job(lane, suffix, size, self._depth_left(lane, node),
                             not self._asks_models(lane))
        lane.job_node = node
        self.state.emit(lane.job)

    def _asks_models(self, lane: Lane) -> bool:
        """Return whether the draft's models are queried: not while they rest, nor after a rest
        whose tokens would take them longer to read than a trial may cost.

        Longer rests would not help: what is read later is read all the same.
        """
        price = self.limits.draft_price
        if not self.limits.asks_models or (price > 0.0 and not self.worth.ask()):
            return False
        missed = len(lane.accepted) - max(lane.asked_at, lane.given)
        reading = price * row_price(self.limits.costs)  # tokens of plain decoding, for each token
        if reading > _READING and missed * reading > LOSS:
            return False
        lane.asked_at = len(lane.accepted)
        return True

    def _job(self, lane: Lane, suffix: tuple[int, ...], max_tokens: int, max_depth: int,
             free_only: bool = False) -> StartDraft:
        self._next_job += 1
        text = lane.text
        return StartDraft(
            self._next_job, lane.path_id, Prefix(text), len(text), suffix,
            lane.request.params, max_tokens, max_depth, self.limits.max_branches,
            self._cutoff(lane), self.limits.p_split, lane.request.stop_ids,
            self.limits.wanted_alternatives, lane.position(len(lane.accepted)) - len(text),
            lane.request.pool, free_only, self.limits.free_max, self.limits.free_min,
            fade=self.calibration.fade, rates=self.calibration.rates,
            chain_min=self.limits.chain_min,
        )

    def _issue_tree(self, lane: Lane, tip: Node, planned: list[Node], size: int) -> None:
        """Issue the tip and at most `size` planned tokens in one run.

        Hints go into the same run if they fit, else into one after it. Other planned tokens wait.
        """
        limits = self.limits
        lane.waiting_tip = None
        if not planned:
            lane.empty_since_accept += 1
            lane.stats.empty_drafts += 1
        again = len(lane.tree.repeated([tip]))
        size = min(size, limits.exact_width - 1 - again)
        if limits.guess_rows:
            size = min(size, max(limits.guess_rows - self.state.guess_rows, 0))
        first = sorted(planned, key=lambda node: -node.score)[:size]
        first = first[:self._worth([probability(one.score, tip) for one in first])]
        due = self.hints is not None and self.hints.due(lane)
        asked = self.hints.plan(lane, [tip, *first], self._last_pos) \
            if due and self.hints is not None else []
        joined = again + 1 + len(first) + len(asked) <= limits.exact_width
        nodes = lane.tree.issue([*first, *asked] if joined else first, self.state.next_run)
        lane.tree.widen(tip, nodes)
        if paid := sum(node.paid for node in nodes):
            self.worth.add(-paid * row_price(limits.costs))
        run = self.state.send([(lane, node) for node in (*lane.tree.repeated([tip]), tip, *nodes)],
                              NO_RUN, speculative=False)
        if not nodes:
            lane.tree.sent(tip)
        if due and self.hints is not None:
            self.hints.sent(lane, run)
            if not joined:
                self.hints.send(lane, asked, self.state)
        if not limits.synchronous:
            lane.reserve.add_leaf(tip)
            lane.reserve.add(planned)

    def _worth(self, chances: list[float]) -> int:
        """How many tokens, likeliest first, gain most beyond the time of their rows, by
        `Limits.costs`.

        Where layers keep a state, a run that is not accepted as a whole costs its accepted rows,
        the tip's included, once more in the next run.
        """
        costs = self.limits.costs
        if not costs:
            return len(chances)
        gains, tokens = [], 0.0
        for size, (chance, cost) in enumerate(zip(chances, costs, strict=False), 1):
            again = 1.0 + tokens - size * chance if self.limits.states else 0.0
            tokens += chance
            gains.append(tokens - cost * (1.0 + max(again, 0.0) / size))
        best = max(gains, default=0.0)
        return gains.index(best) + 1 if best > 0.0 else 0

    def _cutoff(self, lane: Lane) -> float:
        """The confidence that a drafted token needs now (docs/algorithms.md 4.4)."""
        limits = self.limits
        if limits.costs:
            return self.calibration.least_claim(limits.p_min)
        return (limits.p_min + lane.runs_since_accept * limits.p_recovery
                - lane.empty_since_accept * limits.p_decay)

    def _depth_left(self, lane: Lane, tip: Node) -> int:
        """The number of levels below `tip` that could still be part of the output."""
        frontier = lane.tree.frontier
        below = 0 if tip is frontier else tip.pos - frontier.next_pos + 1
        tokens = lane.request.max_tokens - lane.n_output - below
        return min(tokens, self.limits.n_ctx - tip.next_pos) - 1
