//! How each kind of guest answers a request.
//!
//! Promises: every request starts from the warm state, or if the owner configured it, from the
//! state that the last request of the same instance left. Wasm runs in the task of its request and
//! gives way to others every few milliseconds; a micro-VM or a Linux program has a thread while it
//! runs. A client that disconnects ends its call, or the call keeps its place until it ends.
//! Standard output and error of a guest are logged unless the owner sent them elsewhere; of a Linux
//! program that is called through its standard input, the output is the answer, and the errors are
//! logged.

use std::sync::Arc;
use std::time::Duration;

use afresh::wasm::{
    BytesEntry, LeaseOptions, Mode, Output, OwnedLease, StandardStream, Warm, WarmComponent,
};
use afresh::{Guest, Kind, OutputStream};
use bytes::Bytes;

use crate::config::GuestConfig;
use crate::failure::Failure;
use crate::logged_lease::{LogOptions, LoggedLease};
use crate::proxy::Proxy;
use crate::reuse::ReusePool;

/// A guest that is ready to answer.
pub(crate) enum Runner {
    /// A module with the byte interface.
    Module {
        warm: Warm,
        entry: BytesEntry,
        shelf: ReusePool<LoggedLease<OwnedLease>>,
        logging: LogOptions,
    },
    /// A component whose function takes and gives text.
    Component { warm: WarmComponent, function: String, logging: LogOptions },
    /// A component that answers HTTP itself.
    Proxy(Box<Proxy>),
    /// A micro-VM or a Linux program, which block a thread.
    Other { guest: Guest, function: Arc<str>, logging: LogOptions },
}

impl Runner {
    /// The guest of this configuration, opened and tried.
    pub(crate) async fn open(config: &GuestConfig) -> Result<(Guest, Self), afresh::Cause> {
        let logging = LogOptions::of(config);
        // The warm-up belongs to no request.
        let log = logging.log();
        let _warming = log.begin("");
        let mut wasm = afresh::wasm::GuestOptions {
            asynchronous: true,
            gives_way: true,
            imports: config.wasm.imports.clone().component(crate::proxy::link).check_memory(),
            state: crate::proxy::state(),
            ..config.wasm.clone()
        };
        if logging.is_ours {
            wasm.wasi.output = Output::Handler(log.handler());
        }
        let options = config.open.clone().timeout(config.timeout).memory(config.memory).wasm(wasm);
        let reference = config.reference.clone();
        // Warming and compiling block a thread, and may start another runtime.
        let opening = std::thread::Builder::new().name("afresh-open".to_owned());
        let (sender, receiver) = tokio::sync::oneshot::channel();
        opening.spawn(move || sender.send(afresh::open(&reference, &options)))?;
        let guest = receiver.await??;
        let runner = Self::of(&guest, config, logging).await?;
        Ok((guest, runner))
    }

    async fn of(guest: &Guest, config: &GuestConfig, logging: LogOptions) -> Result<Self, Failure> {
        let (most, idle) = (config.max_instance_reuse_count, config.idle_instance_timeout);
        if let Some(warm) = guest.as_module() {
            let entry = warm.bytes_entry(&config.call)?;
            return Ok(Self::Module {
                warm: warm.clone(),
                entry,
                shelf: ReusePool::new(most, idle),
                logging,
            });
        }
        if let Some(warm) = guest.as_component() {
            let shelf = ReusePool::new(most, idle);
            return Ok(match Proxy::of(warm, shelf, logging.clone()).await? {
                Some(proxy) => Self::Proxy(Box::new(proxy)),
                None => {
                    let function = config.call.clone();
                    Self::Component { warm: warm.clone(), function, logging }
                }
            });
        }
        match guest.kind() {
            Kind::Machine | Kind::Program => {
                let function = config.call.as_str().into();
                Ok(Self::Other { guest: guest.clone(), function, logging })
            }
            other => {
                Err(Failure::Request(format!("a guest of kind {other:?} answers no requests")))
            }
        }
    }

    /// Calls the guest with these bytes, for the request of this ID. `kept` is the call's until it
    /// ends, which may be after its client left.
    pub(crate) async fn answer<K: Send + 'static>(
        &self,
        request: &str,
        input: Bytes,
        time: Duration,
        kept: K,
    ) -> Result<(Vec<u8>, K), Failure> {
        match self {
            Self::Module { warm, entry, shelf, logging } => {
                let lease = async |options: LeaseOptions| warm.lease_async(&options).await;
                let (mut used, logged) = logging.take(shelf, request, lease).await?;
                let call = used.lease.lease.call_bytes_async(entry, &input);
                let answer = in_time(time, call).await?;
                // The next request of the instance has another log.
                drop(logged);
                shelf.give_back(used);
                Ok((answer, kept))
            }
            Self::Component { warm, function, logging } => {
                let text = std::str::from_utf8(&input).map_err(|error| {
                    Failure::Request(format!("a component's function takes text: {error}"))
                })?;
                let arguments = [text.to_owned()];
                let lease = async |options: LeaseOptions| warm.lease_async(&options).await;
                let (mut leased, _logged) = logging.lease(request, lease).await?;
                let call = leased.lease.call_text_async(function, &arguments);
                let answer = in_time(time, call).await?;
                Ok((answer.into_bytes(), kept))
            }
            Self::Other { guest, function, logging } => {
                let (guest, function) = (guest.clone(), function.clone());
                let log = logging.log();
                let logged = log.begin(request);
                // A thread in a call cannot be ended from outside: the memory of the call stays
                // with it.
                let call = move || {
                    let _logged = logged;
                    let log = move |stream, piece: &[u8]| match stream {
                        OutputStream::Error => log.write(StandardStream::Error, piece),
                        _ => log.write(StandardStream::Output, piece),
                    };
                    let called = guest
                        .lease()
                        .map_err(afresh::CallError::from)
                        .and_then(|mut lease| lease.call_logged(&*function, &input, log));
                    (called, kept)
                };
                match tokio::task::spawn_blocking(call).await {
                    Ok((answer, kept)) => Ok((answer?, kept)),
                    Err(error) => Err(Failure::Host(error.to_string())),
                }
            }
            Self::Proxy(_) => Err(Failure::Host("a proxy answers requests, not bytes".to_owned())),
        }
    }

    /// The kind of guest, for people.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Module { .. } => "module",
            Self::Component { .. } => "component",
            Self::Proxy(_) => "HTTP component",
            Self::Other { guest, .. } if guest.kind() == Kind::Machine => "micro-VM",
            Self::Other { .. } => "Linux program",
        }
    }

    /// Whether an instance is reset for the next call, or made anew over reset memory.
    pub(crate) fn mode(&self) -> &'static str {
        match self {
            Self::Module { warm, .. } => warm.report().mode.name(),
            Self::Component { .. } | Self::Proxy(_) => Mode::Fresh.name(),
            Self::Other { .. } => Mode::Reset.name(),
        }
    }

    /// Whether the guest takes and gives the bytes of HTTP itself.
    pub(crate) fn listens(&self) -> bool {
        matches!(self, Self::Other { guest, .. } if guest.listens())
    }

    /// Resets instances that were unused for a while.
    pub(crate) fn sweep(&self) {
        match self {
            Self::Module { shelf, .. } => shelf.sweep(),
            Self::Proxy(proxy) => proxy.sweep(),
            Self::Component { .. } | Self::Other { .. } => {}
        }
    }
}

/// Ends a call that takes too long, also while the guest waits for something.
async fn in_time<T>(
    time: Duration,
    call: impl Future<Output = Result<T, afresh::wasm::CallError>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(time, call).await {
        Ok(answered) => Ok(answered?),
        Err(_) => Err(Failure::Timeout),
    }
}
