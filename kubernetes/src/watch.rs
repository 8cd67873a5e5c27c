//! Watches of objects, which fill the queue.
//!
//! Promises: a watch keeps no object. It decodes names, owners and versions alone, so no content of
//! an object can end it, and lists come in small pages.

use futures_util::{Stream, StreamExt};
use kube::runtime::{WatchStreamExt, watcher};
use tokio::sync::Semaphore;

use crate::context::Context;
use crate::metrics::ErrorSource;
use crate::queue::{FairQueue, ObjectKey};
use crate::resource::{ClaimKind, Kind, ObjectHeader, SandboxKind, TemplateKind};

/// Objects of one page of a list. An object has up to 1.5 MiB.
pub const PAGE_ITEMS: u32 = 16;

fn events<K: Kind>(
    context: &Context,
) -> impl Stream<Item = watcher::Result<watcher::Event<ObjectHeader<K>>>> + Send + use<K> {
    let config = watcher::Config::default().page_size(PAGE_ITEMS);
    watcher(context.api_of_all::<ObjectHeader<K>>(), config).default_backoff()
}

/// The objects that a change of one concerns.
fn concerned<K: Kind>(context: &Context, header: &ObjectHeader<K>) -> Vec<ObjectKey> {
    let namespace = header.namespace();
    let key = ObjectKey::new::<K>(namespace, header.name());
    let mut keys = context.interests.of(&key);
    if K::KIND == SandboxKind::KIND
        && let Some(claim) = header.owner::<ClaimKind>()
    {
        keys.push(ObjectKey::new::<ClaimKind>(namespace, claim));
    }
    // Nothing is done for a template itself.
    if K::KIND != TemplateKind::KIND {
        keys.push(key);
    }
    keys
}

/// Puts each object that changes into the queue, and adds a permit to `listed` once all that exist
/// are there. Ends never.
pub async fn watch<K: Kind>(context: &Context, queue: &FairQueue, listed: &Semaphore) {
    let mut is_listed = false;
    let mut events = std::pin::pin!(events::<K>(context));
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Apply(header) | watcher::Event::InitApply(header)) => {
                let key = ObjectKey::new::<K>(header.namespace(), header.name());
                if header.is_new && [SandboxKind::KIND, ClaimKind::KIND].contains(&K::KIND) {
                    context.see(&key);
                }
                concerned(context, &header).into_iter().for_each(|key| queue.add(key));
            }
            Ok(watcher::Event::Delete(header)) => {
                concerned(context, &header).into_iter().for_each(|key| queue.add(key))
            }
            Ok(watcher::Event::Init) => {}
            Ok(watcher::Event::InitDone) if is_listed => {}
            Ok(watcher::Event::InitDone) => {
                is_listed = true;
                listed.add_permits(1);
            }
            Err(error) => {
                context.monitor.metrics.count_error(ErrorSource::Kubernetes);
                tracing::warn!(kind = K::KIND, %error, "a watch of the Kubernetes API failed");
            }
        }
    }
}
