//! Ctrl-C while a command makes calls at a prompt: it ends the running call, not the command.

use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use afresh::StopHandle;
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};

/// The exit code of a command that SIGINT ends, as shells report it.
const EXIT_CODE: i32 = 130;

/// The call that SIGINT ends. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Interrupts(Arc<Mutex<RunningCall>>);

#[derive(Default)]
struct RunningCall {
    /// `None` without a call.
    stop: Option<StopHandle>,
    interrupted: bool,
}

impl Interrupts {
    /// Receives SIGINT from now on. Between two calls it is ignored on a terminal, whose prompt
    /// reads Ctrl-C as a key, and otherwise ends the process.
    pub(crate) fn listen() -> std::io::Result<Self> {
        let this = Self::default();
        let own = this.clone();
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        let mut signals = {
            let _entered = runtime.enter();
            signal(SignalKind::interrupt())?
        };
        std::thread::Builder::new().name("afresh-signals".to_owned()).spawn(move || {
            runtime.block_on(async {
                while signals.recv().await.is_some() {
                    own.interrupt();
                }
            });
        })?;
        Ok(this)
    }

    fn lock(&self) -> MutexGuard<'_, RunningCall> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn interrupt(&self) {
        let mut call = self.lock();
        match &call.stop {
            Some(stop) => {
                stop.stop();
                call.interrupted = true;
            }
            None if !std::io::stdin().is_terminal() => std::process::exit(EXIT_CODE),
            None => {}
        }
    }

    /// Begins a call.
    pub(crate) fn begin(&self, stop: StopHandle) {
        *self.lock() = RunningCall { stop: Some(stop), interrupted: false };
    }

    /// Ends the call, if one has begun. Returns whether it was interrupted.
    pub(crate) fn end(&self) -> bool {
        std::mem::take(&mut *self.lock()).interrupted
    }
}
