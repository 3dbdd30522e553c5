"""vLLM's connectors that offload pages to host memory, with copies that run on a CPU.

vLLM copies with CUDA only. Everything else is vLLM's own: which blocks are saved and loaded, when,
and which bytes of the caches a block has.
"""

from types import SimpleNamespace

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.simple_kv_offload import worker as simple


class CopyingSpec(CPUOffloadingSpec):
    """The specification `CPUOffloadingSpec`, with a worker for CPUs."""

    def get_worker(self, kv_caches):
        return CopyingWorker(kv_caches, self.num_chunks)


class CopyingWorker(OffloadingWorker):
    """Copies blocks between two tensors on a CPU, and reports this one step later."""

    loaded = 0
    """Number of blocks that were loaded, in all engines."""

    heads, lost = 1, 0
    """Number of KV heads, and of the last bytes of each head's part of a page that are overwritten
    after each load."""

    def __init__(self, caches, chunks):
        self._caches = caches
        self._saved = [
            torch.zeros(chunks, one.page_size_bytes, dtype=torch.int8) for one in caches.tensors
        ]
        self._done = []

    def submit_store(self, job_id, src_spec, dst_spec):
        self._copy(src_spec, dst_spec.block_ids, load=False)
        self._done.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def submit_load(self, job_id, src_spec, dst_spec):
        self._copy(dst_spec, src_spec.block_ids, load=True)
        CopyingWorker.loaded += len(src_spec.block_ids)
        self._done.append(TransferResult(job_id, True, 0, 0.0))
        return True

    def _copy(self, blocks, chunks, *, load):
        ids, chunks = blocks.block_ids.tolist(), chunks.tolist()
        assert len(ids) == len(chunks)  # a chunk is a block
        for refs, count in zip(self._caches.group_data_refs, blocks.group_sizes, strict=True):
            for ref in refs:
                cache = self._caches.tensors[ref.tensor_idx].tensor
                saved, size = self._saved[ref.tensor_idx], slice(0, ref.page_size_bytes)
                for block, chunk in zip(ids[:count], chunks[:count], strict=True):
                    if load:
                        cache[block, size] = saved[chunk, size]
                        parts = cache[block, size].view(self.heads, -1)
                        parts[:, parts.shape[1] - self.lost :] = 85
                    else:
                        saved[chunk, size] = cache[block, size]
            ids, chunks = ids[count:], chunks[count:]

    def get_finished(self):
        done, self._done = self._done, []
        return done

    def wait(self, job_ids):
        pass


class Event:
    """An event of a CUDA stream whose work is done at once."""

    def record(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass


class Stream:
    """A CUDA stream whose work is done at once."""

    def __init__(self, priority=0):
        pass

    @staticmethod
    def priority_range():
        return 0, 0


class Backend:
    """Copies blocks for `SimpleCPUOffloadConnector`, in place of its backend for CUDA."""

    def init(self, caches, saved, device, *streams):
        self._caches, self._saved = caches, saved

    def launch_copy(self, sources, targets, is_store, event_idx, events_list, wait_event=None):
        for name, cache in self._caches.items():
            source, target = (cache, self._saved[name])[:: 1 if is_store else -1]
            target[targets] = source[sources]
        CopyingWorker.loaded += 0 if is_store else len(sources)
        events_list.append((event_idx, Event()))

    def shutdown(self):
        pass


def replace_copies(monkeypatch):
    """Let `SimpleCPUOffloadConnector` copy on a CPU."""
    cuda = SimpleNamespace(Stream=Stream, current_stream=lambda: None)
    own = dict(empty=torch.empty, zeros=torch.zeros, int8=torch.int8)
    monkeypatch.setattr(simple, "torch", SimpleNamespace(cuda=cuda, Event=Event, **own))
    monkeypatch.setattr(simple, "DmaCopyBackend", Backend)
    monkeypatch.setattr(simple, "PIN_MEMORY", False)
