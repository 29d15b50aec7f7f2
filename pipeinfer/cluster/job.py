"""A job before and after its stages load: the plan, and the sizes that they were loaded for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from pipeinfer.cluster.assembly import Assembly, ProgressHook
from pipeinfer.cluster.draft_ranks import sliced
from pipeinfer.cluster.placement import Survey
from pipeinfer.cluster.proposers import load_proposers
from pipeinfer.cluster.resolve import Drafting, JobFacts, JobPlan
from pipeinfer.cluster.shard_transfer import source_of
from pipeinfer.cluster.shutdown import survivable
from pipeinfer.cluster.sizing import (
    cells_for,
    chunk_of,
    hint_cells,
    ids_for,
    spare_cells,
    stream_cells,
)
from pipeinfer.config import JobConfig
from pipeinfer.core.control import PortName, Setup
from pipeinfer.core.policy import Policy
from pipeinfer.host import Place
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.nodes import RankInfo
from pipeinfer.planning.planner import Plan
from pipeinfer.planning.replan import Holding
from pipeinfer.runtime.draft_worker import Drafts
from pipeinfer.strategies import registry
from pipeinfer.transport.base import Port


class Job(JobPlan, frozen=True):
    """What is decided before any stage loads.

    facts: from which it was resolved
    target: the model's file
    n_ctx: tokens of a request. width: most rows of a verifying run. n_batch: of any run
    notes: for the user
    """

    facts: JobFacts
    target: Path
    n_ctx: int
    width: int
    n_batch: int
    survey: Survey
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """The assignment of layers at the start."""
        return self.survey.plan

    @property
    def model(self) -> Any:
        """The target's header."""
        return self.facts.model


class LoadedCluster(Struct, frozen=True):
    """The sizes and files for which the stages were loaded.

    cells: of each stage's KV cache, of which `spare` are for speculative tokens.
    chunk: rows of a prompt in one run.
    prompt_id: the first sequence id beyond those of requests.
    vocabulary: for grammars; None if requests may not have one.
    """

    job: Job
    place: Place
    port: Port
    hosts: list[RankInfo]
    tokenizer: Tokenizer
    vocabulary: Vocabulary | None
    cells: int
    spare: int
    chunk: int
    prompt_id: int

    @classmethod
    def of(
        cls, config: JobConfig, place: Place, job: Job, port: Port, hosts: list[RankInfo], *,
        grammars: bool
    ) -> LoadedCluster:
        """Compute the sizes from a config and a plan. grammars: whether requests may have one."""
        credit = config.speculation.credit or len(job.plan.ranks) + 1
        spare = spare_cells(job.width, credit)
        tokenizer = open_tokenizer(job.target)
        return cls(
            job,
            place,
            port,
            hosts,
            tokenizer,
            Vocabulary.of(tokenizer) if grammars and tokenizer.eog_ids else None,
            cells_for(config.speculation, job.n_ctx) + spare + hint_cells(config.speculation),
            spare,
            chunk_of(config),
            ids_for(config.speculation, credit, chains=job.chains),
        )

    def assembly(self, config: JobConfig, progress: ProgressHook | None) -> Assembly:
        """Return the assembly of this cluster; nothing has loaded yet."""
        job, model = self.job, self.job.model
        source = GapModel(model) if job.gaps else model

        learned = bool(registry.adapter(config.speculation))

        def setup_of(holding: Holding) -> Setup:
            last = holding.stop == model.n_layers
            return Setup(
                PortName(0), (), str(job.target), model.fingerprint, model.n_layers, holding.start,
                holding.stop, n_ctx=self.cells, n_seq_max=self.prompt_id + learned,
                n_batch=job.n_batch, prompt_id=self.prompt_id, gaps=job.gaps, settings={},
                stream=stream_cells(job.n_ctx) if job.chains else 0,
                cores=self.hosts[holding.rank].cores_host if job.turns else 0,
                taps=job.taps,
                half_taps=config.cluster.hidden_type == "f16",
                vocabulary=self.vocabulary.to_json() if self.vocabulary and last else None)

        return Assembly(
            config, self.port, job.plan, job.survey.load,
            job.survey.members, self.hosts, setup_of,
            partial(source_of, source), progress, survives=survivable(self.place))

    def proposers(self, chosen: Drafting, assembly: Assembly | None = None) -> Drafts | None:
        """Load proposers. A draft on ranks of its own may not be ready yet.

        assembly: started, so that its members may get slices of a head; None: they do not
        Raises MismatchError for a draft with another vocabulary.
        """
        if chosen.policy is Policy.ITERATIVE:
            return None
        for one in chosen.proposers:
            if one.resource is not None:
                one.resource.check(self.tokenizer)
        found, job = chosen.proposers, self.job
        if assembly is not None:
            ready = {one.rank: one for one in assembly.ready.values()}
            found = sliced(found, chosen.config, assembly.held, ready, job.survey,
                           job.plan.split.slowest if job.plan.timed and not job.turns else 0.0)
        return load_proposers(found, chosen.config, self.place, self.cells, self.tokenizer.n_vocab,
                              self.port, self.hosts, self.vocabulary,
                              lambda: tuple(one.rank for one in assembly.held) if assembly else ())

