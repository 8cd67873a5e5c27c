//! Traces for a collector of OpenTelemetry: OTLP over HTTP in its JSON encoding.
//!
//! Promises: a request never waits for a trace. Finished spans wait in a bounded queue. Spans that
//! do not fit, and those that no collector takes, are dropped and counted in `/metrics`. The log
//! has one line when the collector is away and one when it is back. Variables, names and encoding
//! follow the specification of OpenTelemetry; a request with a W3C `traceparent` continues its
//! trace, and guests and other hosts receive one.

mod context;
mod encode;
mod layer;
mod propagation;
mod sampler;
mod send;
mod settings;

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

pub use context::Context;
pub use layer::Layer;
pub use settings::{Settings, SettingsError};

pub(crate) use context::read_headers;
pub(crate) use propagation::hand_on;

use crate::labels::Labels;

/// Counts of spans by outcome.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    /// Spans that a collector took.
    pub(crate) exported: Counter,
    /// Those that none has, by the reason: the three that follow.
    pub(crate) dropped: Family<Labels, Counter>,
    /// Those for which the queue had no room.
    pub(crate) full: Counter,
    /// Those that a collector refused.
    pub(crate) refused: Counter,
    /// Those that were given up because no collector answered.
    pub(crate) unreachable: Counter,
}

impl Default for Counts {
    fn default() -> Self {
        let dropped = Family::<Labels, Counter>::default();
        let of = |reason: &str| dropped.get_or_create_owned(&vec![("reason", reason.to_owned())]);
        let (full, refused, unreachable) = (of("full"), of("refused"), of("unreachable"));
        Self { exported: Counter::default(), dropped, full, refused, unreachable }
    }
}

/// A way for traces to a collector, before anything is sent.
#[derive(Debug)]
pub struct Traces {
    settings: Settings,
    sender: mpsc::Sender<encode::FinishedSpan>,
    receiver: mpsc::Receiver<encode::FinishedSpan>,
    counts: Counts,
}

impl Traces {
    /// A queue of spans to be sent.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let (sender, receiver) = mpsc::channel(settings.queue);
        Self { settings, sender, receiver, counts: Counts::default() }
    }

    /// A collector of spans, for a subscriber whose root is [`tracing_subscriber::Registry`]. Give
    /// it a filter: it takes every span that it sees.
    #[must_use]
    pub fn layer(&self) -> Layer {
        Layer::new(self.sender.clone(), self.counts.full.clone(), self.settings.sampler)
    }

    /// The counters, for [`Config::traces`](crate::Config::traces).
    #[must_use]
    pub fn counted(&self) -> TraceCounts {
        TraceCounts(self.counts.clone())
    }

    /// Begins to send, in the runtime that this is called in.
    ///
    /// # Errors
    /// [`SettingsError`], when there can be no client for HTTP.
    pub fn begin(self) -> Result<TraceSender, SettingsError> {
        let client = send::client(&self.settings)?;
        let (end, ending) = oneshot::channel();
        let patience = self.settings.timeout;
        let sender = send::Sender::new(Arc::new(self.settings), client, self.counts);
        let task = tokio::spawn(sender.run(self.receiver, ending));
        Ok(TraceSender { end, task, patience })
    }
}

/// Numbers about traces, which a server shows in `/metrics`.
#[derive(Clone, Debug)]
pub struct TraceCounts(pub(crate) Counts);

/// Traces that are being sent.
#[derive(Debug)]
pub struct TraceSender {
    end: oneshot::Sender<()>,
    task: JoinHandle<()>,
    patience: Duration,
}

impl TraceSender {
    /// Sends finished spans once, and ends. It takes no longer than one request may.
    pub async fn end(self) {
        let _ = self.end.send(());
        let mut task = self.task;
        if tokio::time::timeout(self.patience, &mut task).await.is_err() {
            task.abort();
        }
    }
}
