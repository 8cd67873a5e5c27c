//! Limits and totals of System V objects: `IPC_INFO` and its kind, which `ipcs` calls.

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::message_queues::{MAX_BYTES, MAX_MESSAGE, MAX_QUEUES};
use crate::sentry::kernel::semaphores::{MAX_IN_SET, MAX_OPERATIONS, MAX_SETS, MAX_VALUE};
use crate::sentry::mm::layout::PAGE;
use crate::sentry::mm::shared_segments::{MAX_SEGMENT_SIZE, MAX_SEGMENTS};
use crate::sentry::mm::user_memory::copy_out;
use crate::sentry::result::{SyscallControl, SyscallResult};

const IPC_INFO: i32 = 3;
const MSG_INFO: i32 = 12;
const SHM_INFO: i32 = 14;
const SEM_INFO: i32 = 19;

/// The answer of such a call: the highest number in use, or 0.
fn highest(number: Option<u32>) -> SyscallControl {
    SyscallControl::Value(number.unwrap_or(0).into())
}

impl Sentry {
    /// `struct seminfo`; `None` for another command.
    pub(in crate::sentry) fn semaphore_info(
        &self,
        process: &mut Process,
        command: i32,
        to: u64,
    ) -> SyscallResult<Option<SyscallControl>> {
        // Bytes of an adjustment, which Linux does not use.
        const ADJUSTMENT: u32 = 20;
        let (last, sets, all) = self.state.semaphores.totals();
        let (used, change) = match command {
            IPC_INFO => (ADJUSTMENT, u32::from(MAX_VALUE)),
            SEM_INFO => (sets as u32, all as u32),
            _ => return Ok(None),
        };
        let total = (MAX_SETS * MAX_IN_SET) as u32;
        let info = StructBuilder::default().int(total).int(MAX_SETS as u32).int(total).int(total);
        let info = info.int(MAX_IN_SET as u32).int(MAX_OPERATIONS as u32);
        let info = info.int(MAX_OPERATIONS as u32).int(used).int(MAX_VALUE.into()).int(change);
        copy_out(process, to, &info.0)?;
        Ok(Some(highest(last)))
    }

    /// `struct msginfo`; `None` for another command.
    pub(in crate::sentry) fn queue_info(
        &self,
        process: &mut Process,
        command: i32,
        to: u64,
    ) -> SyscallResult<Option<SyscallControl>> {
        // Numbers that Linux does not use, but reports.
        const SEGMENT: u32 = 16;
        const SEGMENTS: u32 = 0xffff;
        const POOL: u32 = 32_000 * (MAX_BYTES as u32 / 1024);
        let (last, queues, messages, bytes) = self.state.queues.totals();
        let [pool, map, all] = match command {
            IPC_INFO => [POOL, MAX_BYTES as u32, MAX_BYTES as u32],
            MSG_INFO => [queues as u32, messages as u32, bytes as u32],
            _ => return Ok(None),
        };
        let info = StructBuilder::default().int(pool).int(map).int(MAX_MESSAGE as u32);
        let info = info.int(MAX_BYTES as u32).int(MAX_QUEUES as u32).int(SEGMENT).int(all);
        copy_out(process, to, &info.half(SEGMENTS as u16).zeros(2).0)?;
        Ok(Some(highest(last)))
    }

    /// `struct shminfo` or `struct shm_info`; `None` for another command.
    pub(in crate::sentry) fn segment_info(
        &self,
        process: &mut Process,
        command: i32,
        to: u64,
    ) -> SyscallResult<Option<SyscallControl>> {
        let (last, segments, bytes) = self.state.system_v.totals();
        let info = match command {
            IPC_INFO => StructBuilder::default()
                .word(MAX_SEGMENT_SIZE)
                .word(1)
                .word(MAX_SEGMENTS as u64)
                .word(MAX_SEGMENTS as u64)
                .word(MAX_SEGMENT_SIZE)
                .zeros(32),
            // All of them are in memory.
            SHM_INFO => StructBuilder::default()
                .int(segments as u32)
                .int(0)
                .word(bytes / PAGE)
                .word(bytes / PAGE)
                .zeros(24),
            _ => return Ok(None),
        };
        copy_out(process, to, &info.0)?;
        Ok(Some(highest(last)))
    }
}
