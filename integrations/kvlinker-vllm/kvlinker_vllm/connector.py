"""KVLinkerConnector, which vLLM loads by ``"kv_connector": "KVLinkerConnector"``; it passes vLLM's
calls on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.engines.native import build_here
from kvlinker.store.format.codecs import find_codec
from kvlinker.store.format.sealing import load_cipher, sealing_of
from kvlinker_vllm.adapter import (
    BlockPool,
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    bind_caller,
    cache_groups,
    forget_prefix,
    require_linkable,
    require_tested_version,
)
from kvlinker_vllm.options import REFUSAL_FILE, ConnectorOptions, connector_settings
from kvlinker_vllm.plugin import end_with_parent
from kvlinker_vllm.protocol.signature import PlanSigner
from kvlinker_vllm.protocol.steps import StepReport, StepTransfers
from kvlinker_vllm.scheduler.transfer_scheduler import (
    FORGET,
    StepLimits,
    TransferScheduler,
)
from kvlinker_vllm.scheduler.window_blocks import WindowBlocks
from kvlinker_vllm.worker.transfer_worker import TransferWorker, WorkerResults
from kvlinker_vllm.worker.worker_chunks import WorkerChunks

logger = logging.getLogger("kvlinker.vllm.connector")


@dataclass(frozen=True, slots=True)
class TransfersMetadata(KVConnectorMetadata):
    """The transfers of a step, which vLLM carries to the workers."""

    transfers: StepTransfers


@dataclass(frozen=True, slots=True)
class ReportMetadata(KVConnectorWorkerMetadata):
    """The report of a step, which vLLM carries back from the workers."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.join(other.report))


class KVLinkerConnector(KVConnectorBase_V1, SupportsHMA):
    """Both sides of the connector; vLLM makes one object for its scheduler and one for each worker.

    ``kv_connector_extra_config`` holds ``ConnectorOptions`` and any of kvlinker's settings; those
    that it leaves out come from ``KVLINKER_*`` variables and the TOML file.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._refusal_file: str | None = options.get(REFUSAL_FILE)
        own = ConnectorOptions.pop_from(options)
        require_tested_version(allow_untested=own.allow_untested)
        require_linkable(vllm_config)
        self._settings = settings = connector_settings(options)
        build_here(settings.native == "build")
        scheduler_config = vllm_config.scheduler_config
        self._limits = StepLimits(
            slice_tokens=min(own.slice_tokens, scheduler_config.max_num_batched_tokens),
            step_tokens=scheduler_config.max_num_batched_tokens,
            runs=scheduler_config.max_num_seqs,
            layers=vllm_config.model_config.get_total_num_hidden_layers(),
            workers=vllm_config.parallel_config.tensor_parallel_size,
            slowdown=own.slowdown,
        )
        is_worker = role == KVConnectorRole.WORKER
        self._chunks = WorkerChunks(
            Path(settings.state_dir) / "chunks",
            memory_bytes=settings.host_memory if is_worker else 0,
            sealing=sealing_of(load_cipher(settings.encryption_key)),
            codec=find_codec(settings.disk_codec),
            pins=is_worker and torch.cuda.is_available(),
        )
        self._scheduler: TransferScheduler | None = None
        if not is_worker:
            end_with_parent()
            signer = PlanSigner.of(settings.state_dir)
            self._scheduler = TransferScheduler(
                limits=self._limits, signer=signer, is_stored=self._chunks.contains
            )
        self._worker: TransferWorker | None = None
        self._report = StepReport()
        self._results = WorkerResults()

    # What vLLM's scheduler calls.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        groups = cache_groups(self._kv_cache_config)
        self._scheduling.lend(WindowBlocks(groups, BlockPool(kv_cache_manager)))

    def on_new_request(self, request: Any) -> None:
        self._scheduling.admit(
            request.request_id,
            request.kv_transfer_params,
            request.prompt_token_ids or (),
            salt=request.cache_salt,
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        matched = self._scheduling.match(
            request.request_id, num_computed_tokens, request.num_tokens
        )
        if matched == FORGET:
            forget_prefix(self._kv_cache_manager, request)
        tokens, waits = matched
        return tokens, waits and tokens is not None

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.begin_transfer(
            request.request_id,
            request.all_token_ids,
            blocks.get_block_ids(),
            external=num_external_tokens,
            vllms=request,
        )

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Report to vLLM's metrics which tokens come from chunks; tokens that linking computes have
        no source."""
        placed = self._scheduling.placed_tokens(request.request_id, external=num_external_tokens)
        by_source = {
            CacheHitSource.HOST: placed,
            CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens - placed,
        }
        return {source: tokens for source, tokens in by_source.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> TransfersMetadata:
        counts = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        prefilled = sum(
            count for name, count in counts.items() if count > 1 + len(drafts.get(name, ()))
        )
        transfers = self._scheduling.plan_step(
            scheduled_tokens=sum(counts.values()), prefilled_tokens=prefilled
        )
        return TransfersMetadata(transfers)

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if metadata is not None:
            self._scheduling.note_report(metadata.report)
        self._scheduling.note_received(connector_output.finished_recving or ())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduling.finish(request.request_id)

    @property
    def _scheduling(self) -> TransferScheduler:
        assert self._scheduler is not None, (
            "vLLM calls the scheduler's methods of a worker's connector"
        )
        return self._scheduler

    # What vLLM's workers call.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Make the worker's side. Raises UnsupportedModelError for a model that cannot be
        linked."""
        try:
            self._worker = TransferWorker(
                bind_caller(),
                self._chunks,
                pass_tokens=self._limits.step_tokens,
                pass_runs=self._limits.runs,
                with_scores=self._settings.chunk_scores,
                native=self._settings.native != "off",
            )
        except UnsupportedModelError as error:
            logger.error(error.message)
            if self._refusal_file is not None:
                Path(self._refusal_file).write_text(error.message)
            raise

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, TransfersMetadata)
        if self._worker is not None:
            self._report, self._results = self._worker.step(metadata.transfers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all KV is loaded before the pass begins."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: nothing is saved from vLLM's own passes."""

    def wait_for_save(self) -> None:
        """Do nothing: nothing is under way."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(
            finished_recving=self._results.finished,
            failed_recving=self._results.failed & self._results.finished,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        results, self._results = self._results, WorkerResults()
        return results.invalid_blocks

    def build_connector_worker_meta(self) -> ReportMetadata:
        """Return a report for every step, even an empty one, so that the scheduler side learns that
        the step is done."""
        report, self._report = self._report, StepReport()
        return ReportMetadata(report)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
