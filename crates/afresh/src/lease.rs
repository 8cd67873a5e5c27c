//! A lease: one instance in the warm state, for calls that belong together.

use crate::call::{CallInput, Entry};
use crate::guest::Backend;
#[cfg(any(feature = "vm", feature = "linux"))]
use crate::pooled::Leased;
use crate::{Answer, Call, CallError, Guest, LeaseError, VerifyError};

/// An instance in the warm state. Calls made through one lease see one another's effects; dropping it
/// undoes them all.
pub struct Lease<'a> {
    pub(crate) guest: &'a Guest,
    pub(crate) instance: Instance<'a>,
}

#[allow(clippy::large_enum_variant, reason = "a box would be an allocation for each call")]
pub(crate) enum Instance<'a> {
    #[cfg(feature = "wasm")]
    Module(afresh_wasm::Lease<'a>),
    #[cfg(feature = "wasm")]
    Component(afresh_wasm::ComponentLease<'a>),
    #[cfg(feature = "vm")]
    Machine(Leased<'a, afresh_vm::Sandbox>),
    #[cfg(feature = "linux")]
    Program(Leased<'a, afresh_linux::Instance>),
}

/// The stream that a guest wrote to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Channel {
    /// Its answer: the standard output of a Linux program.
    Output,
    /// The standard error of a Linux program.
    Messages,
    /// Output of a Linux program to `/dev/host`: for the host alone, apart from its standard output.
    Host,
}

/// The source and the process of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Writer {
    /// The stream.
    pub channel: Channel,
    /// Session id (`setsid`) of the process that wrote; `None` in the session of the program itself.
    pub leader: Option<u32>,
}

impl From<Channel> for Writer {
    fn from(channel: Channel) -> Self {
        Self { channel, leader: None }
    }
}

impl std::fmt::Debug for Lease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("guest", self.guest).finish()
    }
}

#[cfg(feature = "wasm")]
fn not_had(error: afresh_wasm::WarmError) -> LeaseError {
    LeaseError::Instance(error.into())
}

impl<'a> Lease<'a> {
    #[inline]
    pub(crate) fn begin(guest: &'a Guest) -> Result<Self, LeaseError> {
        let instance = match &guest.inner().ready {
            #[cfg(feature = "wasm")]
            Backend::Module(warm) => Instance::Module(warm.lease().map_err(not_had)?),
            #[cfg(feature = "wasm")]
            Backend::Component(warm) => Instance::Component(warm.lease().map_err(not_had)?),
            #[cfg(feature = "vm")]
            Backend::Machine(machines) => Instance::Machine(crate::machine::lease(machines)?),
            #[cfg(feature = "linux")]
            Backend::Program(programs) => Instance::Program(crate::program::lease(programs)?),
        };
        Ok(Self { guest, instance })
    }

    /// An instance that has never run anything but the warm-up, made for this lease and dropped with it;
    /// `None` where instances are always new.
    #[cfg(feature = "wasm")]
    pub(crate) fn untouched(guest: &'a Guest) -> Result<Option<Self>, LeaseError> {
        match &guest.inner().ready {
            Backend::Module(warm) => {
                let instance = Instance::Module(warm.lease_new().map_err(not_had)?);
                Ok(Some(Self { guest, instance }))
            }
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => Ok(None),
        }
    }

    /// Calls a handler that takes bytes and gives bytes.
    ///
    /// # Errors
    /// [`CallError`]; the effects of the call stay until the lease is dropped.
    #[inline]
    pub fn call<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
    ) -> Result<Vec<u8>, CallError> {
        let callee = function.into();
        match &mut self.instance {
            #[cfg(feature = "wasm")]
            Instance::Module(lease) => {
                let looked_up;
                let entry = match callee {
                    Entry::Function(crate::Function { entry: Some(entry), .. }) => entry,
                    _ => {
                        looked_up = self.guest.function(callee.name())?.entry;
                        let Some(entry) = &looked_up else {
                            return Err(misplaced(callee.name()));
                        };
                        entry
                    }
                };
                lease.call_bytes(entry, input).map_err(|e| CallError::of_wasm(callee.name(), e))
            }
            #[cfg(feature = "wasm")]
            Instance::Component(lease) => {
                let name = callee.name();
                let text = std::str::from_utf8(input).map_err(|e| CallError::Request {
                    function: name.to_owned(),
                    source: format!(
                        "a component's function takes text, and the input is not text: {e}"
                    )
                    .into(),
                })?;
                let answer = lease.call_text(name, &[text.to_owned()]);
                answer.map(String::into_bytes).map_err(|e| CallError::of_wasm(name, e))
            }
            #[cfg(feature = "vm")]
            Instance::Machine(machine) => {
                machine.call(input).map_err(|e| CallError::of_vm(callee.name(), e))
            }
            #[cfg(feature = "linux")]
            Instance::Program(program) => crate::program::call(program, callee.name(), input),
        }
    }

    /// As [`Lease::call`], but `hear` receives the output of a Linux program at once, piece by piece, on any
    /// [`Channel`]. The program waits while `hear` runs, its time passes, and `false` ends the call. While a program
    /// writes nothing, `hear` is called with no bytes, at least every 100 ms. For other guests `hear` receives the
    /// whole answer.
    ///
    /// # Errors
    /// As [`Lease::call`]. The pieces so far may be half of an answer then.
    pub fn call_heard<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
        mut hear: impl FnMut(Writer, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        let callee = function.into();
        match &mut self.instance {
            #[cfg(feature = "linux")]
            Instance::Program(program) => {
                crate::program::call_heard(program, callee.name(), input, hear)
            }
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => {
                hear(Channel::Output.into(), &self.call(callee, input)?);
                Ok(())
            }
        }
    }

    /// As [`Lease::call`]. `log` receives a Linux program's output that is not part of its answer, while the program writes it:
    /// [`Channel::Messages`], and of a program that is called through a port [`Channel::Output`]. `log` must bound
    /// what it keeps. Other guests log nothing here: see `Output::Handler` of Wasm guests.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn call_logged<'f>(
        &mut self,
        function: impl Into<Entry<'f>>,
        input: &[u8],
        #[cfg_attr(not(feature = "linux"), expect(unused_variables))] log: impl FnMut(Channel, &[u8])
        + Send
        + 'static,
    ) -> Result<Vec<u8>, CallError> {
        let callee = function.into();
        match &mut self.instance {
            #[cfg(feature = "linux")]
            Instance::Program(program) => {
                crate::program::call_logged(program, callee.name(), input, log)
            }
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => self.call(callee, input),
        }
    }

    /// Lets a Linux program run without a call, with its background work, for a [slice](afresh_linux::Program::slice)
    /// of time or until all of it waits. `hear` as for [`Lease::call_heard`]. Other guests do nothing.
    ///
    /// # Errors
    /// As [`Lease::call`].
    #[cfg(feature = "linux")]
    pub fn proceed(
        &mut self,
        hear: impl FnMut(Writer, &[u8]) -> bool + Send + 'static,
    ) -> Result<(), CallError> {
        self.program().map_or(Ok(()), |program| crate::program::proceed(program, hear))
    }

    /// Time until the next event in a Linux program: zero if some process can run; `None` if all wait for the caller,
    /// and for guests of other kinds.
    #[cfg(feature = "linux")]
    #[must_use]
    pub fn due(&self) -> Option<std::time::Duration> {
        match &self.instance {
            Instance::Program(program) => program.due(),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => None,
        }
    }

    /// Makes any call.
    ///
    /// # Errors
    /// As [`Lease::call`].
    pub fn ask(&mut self, call: &Call) -> Result<Answer, CallError> {
        let name = call.function.as_str();
        match &call.given {
            CallInput::Bytes(input) => self.call(name, input).map(Answer::Bytes),
            CallInput::Text(texts) => self.call_text(name, texts),
        }
    }

    fn call_text(&mut self, name: &str, texts: &[String]) -> Result<Answer, CallError> {
        match &mut self.instance {
            #[cfg(feature = "wasm")]
            Instance::Module(lease) => {
                use afresh_wasm::{parse_arguments, show_value};
                let warm = self.guest.as_module().ok_or_else(|| misplaced(name))?;
                let fail = |e| CallError::of_wasm(name, e);
                let ty = warm.function_type(name).map_err(fail)?;
                let values = parse_arguments(&ty, texts).map_err(|e| CallError::Request {
                    function: name.to_owned(),
                    source: e.into(),
                })?;
                let results = lease.call(name, &values).map_err(fail)?;
                Ok(Answer::Values(results.iter().map(show_value).collect()))
            }
            #[cfg(feature = "wasm")]
            Instance::Component(lease) => {
                if name == START
                    && let Some(run) = self.guest.as_component().and_then(|warm| warm.command())
                {
                    return run_command(lease, &run);
                }
                let answer = lease.call_text(name, texts);
                answer
                    .map(|text| Answer::Values(vec![text]))
                    .map_err(|e| CallError::of_wasm(name, e))
            }
            #[cfg(feature = "vm")]
            Instance::Machine(machine) => {
                let answer = machine.call(texts.join(" ").as_bytes());
                answer.map(Answer::Bytes).map_err(|e| CallError::of_vm(name, e))
            }
            #[cfg(feature = "linux")]
            Instance::Program(program) => {
                let input = crate::program::line(texts);
                crate::program::call(program, name, &input).map(Answer::Bytes)
            }
        }
    }

    /// A unique number for a run from a frozen state, if the guest has one: the same for calls that continue from one
    /// another, another one after each reset, rollback and fork.
    pub fn generation(&mut self) -> Option<u64> {
        match &mut self.instance {
            #[cfg(feature = "wasm")]
            Instance::Module(lease) => Some(lease.host_mut().generation()),
            #[cfg(feature = "linux")]
            Instance::Program(program) => Some(program.generation()),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => None,
        }
    }

    /// Compares the instance with the warm state: how many bytes of memory differ, and how many globals, tables,
    /// segments or registers. For a micro-VM and a Linux program only the first difference is counted, and a program
    /// is reset first: the comparison is with the initial state of the next call.
    ///
    /// # Errors
    /// [`VerifyError::Compare`] when the state cannot be read.
    pub fn differences(&mut self) -> Result<(usize, usize), VerifyError> {
        match &mut self.instance {
            #[cfg(feature = "wasm")]
            Instance::Module(lease) => {
                lease.differences().map_err(|e| VerifyError::Compare(e.into()))
            }
            #[cfg(feature = "wasm")]
            Instance::Component(lease) => {
                let bytes = lease.differences().map_err(|e| VerifyError::Compare(e.into()))?;
                Ok((bytes, 0))
            }
            #[cfg(feature = "vm")]
            Instance::Machine(machine) => {
                use afresh_vm::{Difference, VerifyError as Found};
                match machine.verify() {
                    Ok(()) => Ok((0, 0)),
                    Err(Found::Differs(Difference::Memory { .. })) => Ok((1, 0)),
                    Err(Found::Differs(_)) => Ok((0, 1)),
                    Err(error) => Err(VerifyError::Compare(error.into())),
                }
            }
            #[cfg(feature = "linux")]
            Instance::Program(program) => {
                use afresh_linux::VerifyError as Found;
                match program.verify() {
                    Ok(_) => Ok((0, 0)),
                    Err(Found::Memory(_)) => Ok((1, 0)),
                    Err(Found::Platform(error)) => Err(VerifyError::Compare(error.into())),
                    Err(_) => Ok((0, 1)),
                }
            }
        }
    }

    /// Drops the instance instead of bringing it back.
    pub fn discard(self) {
        match self.instance {
            #[cfg(feature = "wasm")]
            Instance::Module(lease) => lease.discard(),
            #[cfg(feature = "wasm")]
            Instance::Component(lease) => drop(lease),
            #[cfg(feature = "vm")]
            Instance::Machine(machine) => machine.discard(),
            #[cfg(feature = "linux")]
            Instance::Program(program) => program.discard(),
        }
    }

    /// The instance of a module, if it is one: for typed calls and host state.
    #[cfg(feature = "wasm")]
    #[must_use]
    pub fn as_module(&mut self) -> Option<&mut afresh_wasm::Lease<'a>> {
        match &mut self.instance {
            Instance::Module(lease) => Some(lease),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => None,
        }
    }

    /// The sandbox, if it is a micro-VM.
    #[cfg(feature = "vm")]
    #[must_use]
    pub fn as_machine(&mut self) -> Option<&mut afresh_vm::Sandbox> {
        match &mut self.instance {
            Instance::Machine(machine) => Some(machine),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => None,
        }
    }

    /// The instance, if it is a Linux program.
    #[cfg(feature = "linux")]
    #[must_use]
    pub fn as_program(&mut self) -> Option<&mut afresh_linux::Instance> {
        match &mut self.instance {
            Instance::Program(program) => Some(program),
            #[allow(unreachable_patterns, reason = "other kinds are other features")]
            _ => None,
        }
    }
}

/// The export that a WASI command begins at. In a component it is the `run` of `wasi:cli/run`, which this name also
/// means.
#[cfg(feature = "wasm")]
const START: &str = "_start";

/// Runs a command that is a component, whose failure is a result.
#[cfg(feature = "wasm")]
fn run_command(
    lease: &mut afresh_wasm::ComponentLease<'_>,
    run: &str,
) -> Result<Answer, CallError> {
    use afresh_wasm::wasmtime::component::Val;
    let results = match lease.call(run, &[]) {
        // A command that ends itself with success has succeeded.
        Err(afresh_wasm::CallError::Exit(0)) => return Ok(Answer::Values(Vec::new())),
        other => other.map_err(|e| CallError::of_wasm(run, e))?,
    };
    match results.first() {
        Some(Val::Result(Err(_))) => Err(CallError::Guest {
            function: run.to_owned(),
            source: "the command reported a failure".into(),
        }),
        _ => Ok(Answer::Values(Vec::new())),
    }
}

/// An entry of another guest.
#[cfg(feature = "wasm")]
fn misplaced(name: &str) -> CallError {
    CallError::Request {
        function: name.to_owned(),
        source: "it was looked up in a guest of another kind".into(),
    }
}
