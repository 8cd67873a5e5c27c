//! `ptrace(2)`: attaching, resuming, and requests about a stop, except those for registers and
//! memory ([`TraceRequest`]).
//!
//! A process may trace threads of other processes that it may inspect
//! ([`Kernel::may_inspect`]), if they have no tracer.
//!
//! [`Kernel::may_inspect`]: crate::sentry::Kernel::may_inspect

use rustix::io::Errno;

use crate::platform::{INFO_LEN, Process};
use crate::sentry::Sentry;
use crate::sentry::abi::{GENERAL_LEN, StructBuilder, TRACES};
use crate::sentry::kernel::signals::{KERNEL, SignalInfo, UNTOUCHABLE};
use crate::sentry::kernel::trace_request::{TraceOperation, TraceRequest};
use crate::sentry::kernel::tracing::{
    ALL_OPTIONS, EVENT_STOP, ResumeMode, Trace, TraceStop, TracedCall,
};
use crate::sentry::kernel::users::REAL;
use crate::sentry::mm::user_memory::{copy_in, copy_out, word_in};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

const TRACEME: u64 = 0;
const PEEKTEXT: u64 = 1;
const PEEKDATA: u64 = 2;
const PEEKUSER: u64 = 3;
const POKETEXT: u64 = 4;
const POKEDATA: u64 = 5;
const POKEUSER: u64 = 6;
const CONT: u64 = 7;
const KILL: u64 = 8;
const SINGLESTEP: u64 = 9;
const GETREGS: u64 = 12;
const SETREGS: u64 = 13;
const GETFPREGS: u64 = 14;
const SETFPREGS: u64 = 15;
const ATTACH: u64 = 16;
const DETACH: u64 = 17;
const SYSCALL: u64 = 24;
const SETOPTIONS: u64 = 0x4200;
const GETEVENTMSG: u64 = 0x4201;
const GETSIGINFO: u64 = 0x4202;
const SETSIGINFO: u64 = 0x4203;
const GETREGSET: u64 = 0x4204;
const SETREGSET: u64 = 0x4205;
const SEIZE: u64 = 0x4206;
const INTERRUPT: u64 = 0x4207;
const LISTEN: u64 = 0x4208;
const PEEKSIGINFO: u64 = 0x4209;
const GETSIGMASK: u64 = 0x420a;
const SETSIGMASK: u64 = 0x420b;
const GET_SYSCALL_INFO: u64 = 0x420e;

/// Bytes of `struct user_fpregs_struct`.
const FLOATING_LEN: usize = 512;
/// Maximum bytes of a set of registers, and of the state that `XSAVE` stores.
const MAX_SET: u64 = 1 << 14;

impl Sentry {
    /// `ptrace(2)`: not on arm64. Debug registers only keep their values. `PTRACE_SYSEMU`,
    /// `PTRACE_SINGLEBLOCK` and seccomp filters of tracees are `EIO`.
    pub(in crate::sentry) fn sys_ptrace(
        &mut self,
        process: &mut Process,
        request: u64,
        pid: u64,
        addr: u64,
        data: u64,
    ) -> SyscallResult {
        if !TRACES {
            return self.refuse_unknown(libc::SYS_ptrace);
        }
        let thread = pid as u32;
        match request {
            TRACEME => return self.trace_me(),
            ATTACH => return self.attach_to(thread, 0, false),
            SEIZE if addr != 0 || data & !u64::from(ALL_OPTIONS) != 0 => {
                return Err(Errno::IO.into());
            }
            SEIZE => return self.attach_to(thread, data as u32, true),
            _ => {}
        }
        let own = self.state.processes.current_id();
        let trace = self.state.processes.tracing.get(thread).filter(|trace| trace.tracer == own);
        let trace = trace.ok_or(Errno::SRCH)?;
        let (home, stop) = (trace.process, trace.stop.clone());
        match request {
            KILL => {
                self.change().send_to(
                    home,
                    None,
                    SignalInfo::new(libc::SIGKILL as u8, 0, KERNEL, 0),
                );
                return Ok(ZERO);
            }
            INTERRUPT => return self.interrupt_tracee(thread),
            _ => {}
        }
        // A tracee that listens is in no stop.
        let stop = stop.filter(|_| !trace.listens).ok_or(Errno::SRCH)?;
        let ask = |operation, to, room| {
            Ok(SyscallControl::Trace(Box::new(TraceRequest {
                process: home,
                thread,
                operation,
                to,
                room,
                length_to: None,
                counts: false,
                moves: None,
            })))
        };
        match request {
            PEEKTEXT | PEEKDATA => ask(TraceOperation::Peek(addr), data, 8),
            POKETEXT | POKEDATA => ask(TraceOperation::Poke(addr, data), 0, 0),
            PEEKUSER => ask(TraceOperation::PeekUser(addr), data, 8),
            POKEUSER => ask(TraceOperation::PokeUser(addr, data), 0, 0),
            CONT => self.resume_traced(thread, ResumeMode::Runs, &stop, data),
            SYSCALL => self.resume_traced(thread, ResumeMode::ToCall, &stop, data),
            SINGLESTEP => self.resume_traced(thread, ResumeMode::Steps, &stop, data),
            DETACH => self.detach_from(thread, &stop, data),
            LISTEN => self.listen_to(thread, &stop),
            GETREGS => ask(TraceOperation::GeneralRegisters, data, GENERAL_LEN as u64),
            SETREGS => {
                let bytes = copy_in(process, data, GENERAL_LEN)?;
                ask(TraceOperation::SetGeneralRegisters(bytes), 0, 0)
            }
            GETFPREGS => {
                ask(TraceOperation::Vectors { extended: false }, data, FLOATING_LEN as u64)
            }
            SETFPREGS => {
                let bytes = copy_in(process, data, FLOATING_LEN)?;
                ask(TraceOperation::SetVectors { bytes, extended: false }, 0, 0)
            }
            GETREGSET | SETREGSET => {
                let (base, len) = (word_in(process, data)?, word_in(process, data + 8)?);
                let operation = match (request, addr) {
                    _ if len % 8 != 0 => return Err(Errno::INVAL.into()),
                    (GETREGSET, 1) => TraceOperation::GeneralRegisters,
                    (GETREGSET, 2) => TraceOperation::Vectors { extended: false },
                    (GETREGSET, 0x202) => TraceOperation::Vectors { extended: true },
                    (SETREGSET, 1 | 2 | 0x202) => {
                        let bytes = copy_in(process, base, len.min(MAX_SET) as usize)?;
                        match addr {
                            1 => TraceOperation::SetGeneralRegisters(bytes),
                            _ => TraceOperation::SetVectors { bytes, extended: addr != 2 },
                        }
                    }
                    _ => return Err(Errno::INVAL.into()),
                };
                Ok(SyscallControl::Trace(Box::new(TraceRequest {
                    process: home,
                    thread,
                    operation,
                    to: base,
                    room: len,
                    length_to: Some(data + 8),
                    counts: false,
                    moves: None,
                })))
            }
            GET_SYSCALL_INFO => {
                let (operation, counts) = (TraceOperation::CallInfo, true);
                Ok(SyscallControl::Trace(Box::new(TraceRequest {
                    process: home,
                    thread,
                    operation,
                    to: data,
                    room: addr,
                    length_to: None,
                    counts,
                    moves: None,
                })))
            }
            SETOPTIONS if data & !u64::from(ALL_OPTIONS) != 0 => Err(Errno::INVAL.into()),
            SETOPTIONS => {
                self.edit_trace(thread, |trace| trace.options = data as u32);
                Ok(ZERO)
            }
            GETEVENTMSG => {
                let message = trace.message;
                copy_out(process, data, &message.to_le_bytes())?;
                Ok(ZERO)
            }
            GETSIGINFO => {
                let info = self.info_of_stop(thread, &stop)?;
                copy_out(process, data, &info.all())?;
                Ok(ZERO)
            }
            SETSIGINFO => {
                let given = copy_in(process, data, INFO_LEN)?;
                let TraceStop::Signal(before) = &stop else { return Err(Errno::INVAL.into()) };
                let info = SignalInfo::from_guest(before.signal, &given);
                self.edit_trace(thread, |trace| trace.stop = Some(TraceStop::Signal(info)));
                Ok(ZERO)
            }
            PEEKSIGINFO => self.peek_signals(process, (home, thread), addr, data),
            GETSIGMASK if addr == 8 => {
                let blocked = self.state.processes.get(home).and_then(|p| p.threads.get(thread));
                let blocked = blocked.ok_or(Errno::SRCH)?.blocked;
                copy_out(process, data, &blocked.to_le_bytes())?;
                Ok(ZERO)
            }
            SETSIGMASK if addr == 8 => {
                let set = word_in(process, data)? & !UNTOUCHABLE;
                let found = self.change().processes.get_mut(home);
                let found = found.and_then(|process| process.threads.get_mut(thread));
                found.ok_or(Errno::SRCH)?.blocked = set;
                Ok(ZERO)
            }
            GETSIGMASK | SETSIGMASK => Err(Errno::INVAL.into()),
            _ => Err(Errno::IO.into()),
        }
    }

    fn edit_trace(&mut self, thread: u32, edit: impl FnOnce(&mut Trace)) {
        if let Some(trace) = self.change().processes.tracing.get_mut(thread) {
            edit(trace);
        }
    }

    /// The current thread is traced by its parent from now on.
    fn trace_me(&mut self) -> SyscallResult {
        let info = &self.state.current().info;
        let (own, parent) = (info.id, info.parent);
        if self.state.own_trace().is_some() || !self.state.processes.lives(parent) {
            return Err(Errno::PERM.into());
        }
        let state = self.change();
        let thread = state.processes.current.threads.current_id();
        let mut trace = Trace::new(parent, own, 0, false);
        // The call that it is in.
        trace.number = libc::SYS_ptrace as i32;
        state.processes.tracing.insert(thread, trace);
        Ok(ZERO)
    }

    /// Traces a thread of another process.
    fn attach_to(&mut self, thread: u32, options: u32, seizes: bool) -> SyscallResult {
        let own = self.state.processes.current_id();
        let home = self.state.home_of_thread(thread).ok_or(Errno::SRCH)?;
        let is_traced = self.state.processes.tracing.get(thread).is_some();
        if home == own || is_traced || !self.state.may_inspect(home, REAL) {
            return Err(Errno::PERM.into());
        }
        let stopped = self.state.processes.info(home).and_then(|info| info.stopped);
        let state = self.change();
        // A thread that was held at a call makes it after the end of its tracer.
        let held = state.processes.tracing.remove(thread).is_some_and(|trace| trace.held);
        let mut trace = Trace::new(own, home, options, seizes);
        if held {
            trace.held = true;
            trace.call = Some(TracedCall { number: 0, result: -i64::from(libc::ENOSYS) });
        }
        let waits = state.wait_of(home, thread).is_some();
        let call = state.processes.get(home).and_then(|process| process.threads.get(thread));
        let call = call.and_then(|thread| thread.context.as_ref()?.call());
        if let (true, Some((number, _))) = (waits, call) {
            trace.number = number as i32;
        }
        state.processes.tracing.insert(thread, trace);
        if let Some(signal) = stopped {
            state.stop_tracee(thread, TraceStop::Group(signal));
        }
        if !seizes {
            let info = SignalInfo::new(libc::SIGSTOP as u8, 0, KERNEL, 0);
            state.send_to(home, Some(thread), info);
        }
        Ok(ZERO)
    }

    /// `PTRACE_INTERRUPT`: all threads stand still, so the tracee stops where it is.
    fn interrupt_tracee(&mut self, thread: u32) -> SyscallResult {
        let trace = self.state.processes.tracing.get(thread).ok_or(Errno::SRCH)?;
        let (seized, stopped, listens) = (trace.seized, trace.stop.is_some(), trace.listens);
        if !seized {
            return Err(Errno::IO.into());
        }
        let trap = TraceStop::Event(EVENT_STOP, u64::from(libc::SIGTRAP as u32));
        if stopped && !listens {
            self.edit_trace(thread, |trace| trace.plan(trap));
        } else {
            self.change().stop_tracee(thread, trap);
        }
        Ok(ZERO)
    }

    /// `PTRACE_LISTEN`: the tracee stays stopped until its process continues.
    fn listen_to(&mut self, thread: u32, stop: &TraceStop) -> SyscallResult {
        let is_seized = self.state.processes.tracing.get(thread).is_some_and(|trace| trace.seized);
        if !is_seized || !matches!(stop, TraceStop::Group(_) | TraceStop::Event(EVENT_STOP, _)) {
            return Err(Errno::IO.into());
        }
        let mut trap = false;
        self.edit_trace(thread, |trace| {
            (trace.listens, trace.reported) = (true, true);
            trap = trace.take_trap();
        });
        if trap {
            let trap = TraceStop::Event(EVENT_STOP, u64::from(libc::SIGTRAP as u32));
            self.change().stop_tracee(thread, trap);
        }
        Ok(ZERO)
    }

    /// Continues a tracee, with a signal.
    fn resume_traced(
        &mut self,
        thread: u32,
        mode: ResumeMode,
        stop: &TraceStop,
        signal: u64,
    ) -> SyscallResult {
        if signal > 64 {
            return Err(Errno::IO.into());
        }
        self.choose_signal(thread, stop, signal as u8);
        let state = self.change();
        state.resume_tracee(thread, mode);
        let Some(trace) = state.processes.tracing.get(thread) else { return Ok(ZERO) };
        let is_quiet = trace.injected.is_none() && matches!(stop, TraceStop::Signal(_));
        let (home, number) = (trace.process, trace.number);
        if mode == ResumeMode::ToCall && is_quiet && state.wait_of(home, thread).is_some() {
            // The interrupted call goes back to its wait, which the tracer sees as another call.
            let call = TracedCall { number, result: -i64::from(libc::ENOSYS) };
            self.edit_trace(thread, |trace| trace.call = Some(call));
            self.change().stop_tracee(thread, TraceStop::Entry);
        }
        Ok(ZERO)
    }

    /// The tracee receives `signal` in the place of the one that it has stopped for.
    fn choose_signal(&mut self, thread: u32, stop: &TraceStop, signal: u8) {
        if signal == 0 {
            return;
        }
        let own = self.state.sender(self.state.processes.current_id());
        let chosen = SignalInfo::new(signal, 0, own, 0);
        match stop {
            TraceStop::Signal(info) => {
                let info = if info.signal == signal { info.clone() } else { chosen };
                self.edit_trace(thread, |trace| trace.injected = Some(info));
            }
            TraceStop::Entry | TraceStop::Exit => {
                if let Some(home) = self.state.home_of_thread(thread) {
                    self.change().send_to(home, Some(thread), chosen);
                }
            }
            TraceStop::Event(..) | TraceStop::Group(_) => {}
        }
    }

    /// Ends the trace of a tracee.
    fn detach_from(&mut self, thread: u32, stop: &TraceStop, signal: u64) -> SyscallResult {
        if signal > 64 {
            return Err(Errno::IO.into());
        }
        let home = self.state.home_of_thread(thread).ok_or(Errno::SRCH)?;
        let signal = signal as u8;
        if signal != 0 && !matches!(stop, TraceStop::Event(..) | TraceStop::Group(_)) {
            let own = self.state.sender(self.state.processes.current_id());
            let info = match stop {
                TraceStop::Signal(info) if info.signal == signal => info.clone(),
                _ => SignalInfo::new(signal, 0, own, 0),
            };
            self.change().processes.tracing.release(thread);
            self.change().send_to(home, Some(thread), info);
        } else {
            self.change().processes.tracing.release(thread);
        }
        Ok(ZERO)
    }

    /// The information of a stop: that of its signal, or of a trap.
    fn info_of_stop(&self, thread: u32, stop: &TraceStop) -> SyscallResult<SignalInfo> {
        let trace = self.state.processes.tracing.get(thread).ok_or(Errno::SRCH)?;
        let code = trace.code(stop);
        match stop {
            TraceStop::Signal(info) => Ok(info.clone()),
            TraceStop::Group(_) if !trace.seized => Err(Errno::INVAL.into()),
            _ => {
                let user = self.state.sender(trace.process)[1];
                let signal = (code & 0x7f) as u8;
                Ok(SignalInfo::new(signal, code as i32, [thread, user], 0))
            }
        }
    }

    /// `PTRACE_PEEKSIGINFO`: pending signals, of the thread or of its process.
    fn peek_signals(
        &mut self,
        process: &mut Process,
        (home, thread): (u32, u32),
        addr: u64,
        data: u64,
    ) -> SyscallResult {
        let (offset, rest) = (word_in(process, addr)?, word_in(process, addr.wrapping_add(8))?);
        let (flags, count) = (rest as u32, (rest >> 32) as i32);
        if flags & !1 != 0 || count < 0 {
            return Err(Errno::INVAL.into());
        }
        let found = self.state.processes.get(home).ok_or(Errno::SRCH)?;
        let pending = match flags {
            1 => &found.pending,
            _ => &found.threads.get(thread).ok_or(Errno::SRCH)?.pending,
        };
        let infos = pending.iter().skip(offset.min(1 << 20) as usize).take(count as usize);
        let infos: Vec<_> = infos.map(SignalInfo::all).collect();
        let count = infos.len();
        let bytes = StructBuilder(infos.concat());
        copy_out(process, data, &bytes.0)?;
        Ok(SyscallControl::Value(count as u64))
    }
}
