//! Requests about watchers of directories, in the shape of the E2B agent.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use hyper::HeaderMap;
use serde_json::json;

use crate::body::StreamedAnswer;
use crate::sandbox::agent::commands::Subscriber;
use crate::sandbox::agent::connect::{self, ConnectError};
use crate::sandbox::agent::process::{decode_request, keepalive_interval, streamed};
use crate::sandbox::agent::watchers::EventReceiver;
use crate::sandbox::http::user::User;
use crate::sandbox::lifecycle::random::random;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::request_body::requests::WatchRequest;
use crate::sandbox::transfer::file_entry::absolute;

/// The methods of watchers.
pub(crate) const METHODS: [&str; 4] =
    ["WatchDir", "CreateWatcher", "GetWatcherEvents", "RemoveWatcher"];
/// Time for which a poll waits for the present call.
const POLL_PATIENCE: Duration = Duration::from_millis(500);

fn keepalive() -> Vec<u8> {
    connect::message(0, &json!({"keepalive": {}}))
}

/// Answers a request about watchers.
pub(crate) async fn answer(
    all: &Arc<Sandboxes>,
    sandbox: &Arc<Sandbox>,
    user: User,
    method: &str,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Response, ConnectError> {
    match method {
        "WatchDir" => {
            let (client, heard) =
                Subscriber::with_keepalive(keepalive_interval(headers), keepalive);
            let _ = client.send(connect::message(0, &json!({"start": {}})));
            let receiver = EventReceiver::Streamed(Some(client));
            let wanted = connect::decode_stream_request(body)?;
            add(all, sandbox, (user, wanted), String::new(), receiver).await?;
            let mut response = streamed(Body::new(heard));
            response.extensions_mut().insert(StreamedAnswer);
            Ok(response)
        }
        "CreateWatcher" => {
            let id = random(8)?;
            let receiver = EventReceiver::Polled(Ok(Vec::new()));
            add(all, sandbox, (user, decode_request(body)?), id.clone(), receiver).await?;
            Ok(axum::Json(json!({ "watcherId": id })).into_response())
        }
        _ => {
            let wanted: WatchRequest = decode_request(body)?;
            if method == "RemoveWatcher" {
                sandbox.watchers.remove(&wanted.watcher_id)?;
                return Ok(axum::Json(json!({})).into_response());
            }
            // A client may know of a change by the end of a command, before the call that it ended
            // in. A call that lasts is not waited for.
            let _ = tokio::time::timeout(POLL_PATIENCE, all.with(sandbox, |_| Ok(()))).await;
            let events = sandbox.watchers.take(&wanted.watcher_id)?;
            Ok(axum::Json(json!({ "events": events })).into_response())
        }
    }
}

async fn add(
    all: &Arc<Sandboxes>,
    sandbox: &Arc<Sandbox>,
    (user, mut wanted): (User, WatchRequest),
    id: String,
    receiver: EventReceiver,
) -> Result<(), ConnectError> {
    wanted.path = absolute(&wanted.path, user);
    let own = sandbox.clone();
    let this = all.clone();
    let adding = all.tree(sandbox, move |tree| {
        let admit = |bytes| this.check_memory(&own.tenant, bytes);
        Ok(own.watchers.add(tree, &wanted, (id, receiver), admit))
    });
    adding.await?
}
