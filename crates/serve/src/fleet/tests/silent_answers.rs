//! Answers of another host whose body is silent.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper::{Request, StatusCode};
use serde_json::json;
use tokio::sync::mpsc;

use super::NatsServer;
use crate::fleet::Fleet;
use crate::fleet::clock::clock_milliseconds;
use crate::fleet::frame::{self, RpcReply};
use crate::fleet::host::FleetHost;
use crate::fleet::rpc_client::ForwardResult;
use crate::lock::lock;
use crate::sandbox::records::store::SandboxHost;

/// Far longer than anything takes on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// A host that answers once, with the pieces that a channel brings.
struct StreamingHost(Mutex<Option<mpsc::Receiver<Bytes>>>);

#[async_trait]
impl FleetHost for StreamingHost {
    fn busy(&self) -> (usize, usize) {
        (0, 1)
    }

    fn routes(&self) -> Vec<String> {
        Vec::new()
    }

    fn sandboxes(&self) -> Option<Arc<dyn SandboxHost>> {
        None
    }

    async fn answer_other(&self, _: Request<Body>, _: bool) -> Option<Response> {
        let mut pieces = lock(&self.0).take()?;
        let pieces = futures_util::stream::poll_fn(move |context| pieces.poll_recv(context));
        let pieces = pieces.map(|piece| Ok::<_, Infallible>(Frame::data(piece)));
        let mut response = Response::new(Body::new(StreamBody::new(pieces)));
        *response.status_mut() = StatusCode::CREATED;
        Some(response)
    }

    fn shutdown(&self) {}
}

/// Two hosts. The second answers with the pieces of the channel, while its guest lives.
async fn hosts(
    server: &NatsServer,
) -> (Arc<Fleet>, Arc<Fleet>, Arc<dyn FleetHost>, mpsc::Sender<Bytes>) {
    let (host, other) = (server.host().await, server.host().await);
    let (sender, receiver) = mpsc::channel(1);
    let attached: Arc<dyn FleetHost> = Arc::new(StreamingHost(Mutex::new(Some(receiver))));
    other.begin(&attached).await.unwrap();
    (host, other, attached, sender)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_head_of_a_silent_answer_comes_before_its_body_and_a_client_that_leaves_ends_it() {
    let Some(server) = NatsServer::start() else { return };
    let (host, other, _attached, sender) = hosts(&server).await;
    let request = Request::builder().uri("/events").body(Body::empty()).unwrap();
    let life = other.life();
    let answering = host.forward(&life, request, false);
    let answered = tokio::time::timeout(TEST_TIMEOUT, answering).await;
    let ForwardResult::Answered(response) = answered.expect("the head waits for the body") else {
        panic!("the host listens");
    };
    assert_eq!(response.status(), StatusCode::CREATED);
    let mut body = response.into_body();
    for piece in ["one", "two"] {
        sender.send(Bytes::from_static(piece.as_bytes())).await.unwrap();
        let frame = body.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), piece);
    }
    // The client waits for a further piece and leaves.
    assert!(futures_util::FutureExt::now_or_never(body.frame()).is_none());
    drop(body);
    let ended = tokio::time::timeout(TEST_TIMEOUT, sender.closed()).await;
    ended.expect("the other host keeps an answer without a reader");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_of_an_earlier_version_gets_the_head_with_the_first_bytes() {
    let Some(server) = NatsServer::start() else { return };
    let (host, other, _attached, sender) = hosts(&server).await;
    let open = json!({"method": "GET", "uri": "/", "headers": [], "whole": true, "take": false});
    let call = json!({"key": 1, "sent": clock_milliseconds(), "request": {"open": open}});
    let message = frame::pack(&call, &[]).unwrap();
    let subject = other.links.subject(&format!("host.{}.call", other.node));
    let asking = host.links.client.request(subject, message);
    tokio::pin!(asking);
    let early = tokio::time::timeout(Duration::from_millis(500), &mut asking).await;
    assert!(early.is_err(), "it would take an empty piece for the end: {early:?}");
    sender.send(Bytes::from_static(b"one")).await.unwrap();
    let (reply, piece) = frame::unpack::<RpcReply>(&asking.await.unwrap().payload).unwrap();
    assert!(matches!(reply, RpcReply::Answer { whole: false, .. }), "{reply:?}");
    assert_eq!(piece, "one");
}
