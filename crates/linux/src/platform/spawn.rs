//! Starts guest processes: from a thread that lasts until this process ends.
//!
//! A guest's process dies with the thread that started it (`PR_SET_PDEATHSIG`), so that none
//! outlives a host that was killed. A caller's thread may end while others still use the guest;
//! this one does not.

use std::io;
use std::process::{Child, Command};
use std::sync::Mutex;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};

use afresh_sys::{PerProcess, fork};

struct Request {
    command: Command,
    answer: SyncSender<io::Result<Child>>,
}

/// A forked child starts another thread.
static STARTER: PerProcess<Mutex<Option<Sender<Request>>>> = PerProcess::new(|| Mutex::new(None));

/// Starts `command` from that thread.
pub(super) fn spawn(command: Command) -> io::Result<Child> {
    let ended = || io::Error::other("the thread that starts guests has ended");
    let (answer, started) = sync_channel(1);
    {
        let mut starter = STARTER.get().lock().map_err(|_| ended())?;
        let requests = match &*starter {
            Some(requests) => requests,
            None => {
                let (requests, waiting) = channel::<Request>();
                std::thread::Builder::new().name("afresh-linux".to_owned()).spawn(move || {
                    for Request { mut command, answer } in waiting {
                        let _ = answer.send(fork::to_execute(|| command.spawn()));
                    }
                })?;
                starter.insert(requests)
            }
        };
        requests.send(Request { command, answer }).map_err(|_| ended())?;
    }
    started.recv().map_err(|_| ended())?
}

/// Keeps others from starting processes while the value lives.
#[cfg(test)]
pub(super) fn hold() -> impl Sized {
    STARTER.get().lock()
}
