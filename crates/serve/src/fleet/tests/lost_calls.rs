//! Requests whose other host is lost before it answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_nats::Message;
use async_trait::async_trait;
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper::header::RETRY_AFTER;
use hyper::{Method, Request, StatusCode};
use tokio::sync::mpsc;

use super::NatsServer;
use crate::fleet::Fleet;
use crate::fleet::frame::{self, Call, RpcReply, RpcRequest};
use crate::fleet::host::FleetHost;
use crate::fleet::rpc_client::ForwardResult;
use crate::sandbox::records::store::SandboxHost;

/// The life of a host that reads its messages and executes nothing.
const SILENT: &str = "silent-1";

/// A host that counts the requests that it executes.
#[derive(Default)]
struct CountingHost(AtomicUsize);

#[async_trait]
impl FleetHost for CountingHost {
    fn busy(&self) -> (usize, usize) {
        (0, 1)
    }

    fn routes(&self) -> Vec<String> {
        Vec::new()
    }

    fn sandboxes(&self) -> Option<Arc<dyn SandboxHost>> {
        None
    }

    async fn answer_other(&self, request: Request<Body>, _: bool) -> Option<Response> {
        if request.into_body().collect().await.is_ok() {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        Some(Response::new(Body::empty()))
    }

    fn shutdown(&self) {}
}

/// Reads the messages to the silent host. It answers the first piece of a body where it `accepts`
/// bodies, and reports that no call runs. The channel has the messages without an answer.
async fn listen_silently(host: &Arc<Fleet>, accepts: bool) -> mpsc::UnboundedReceiver<Message> {
    let client = host.links.client.clone();
    let subject = host.links.subject("host.silent.call");
    let mut messages = client.subscribe(subject).await.unwrap();
    client.flush().await.unwrap();
    let (sender, kept) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(message) = messages.next().await {
            let (call, _) = frame::unpack::<Call>(&message.payload).unwrap();
            let reply = match call.request {
                RpcRequest::Running { .. } => RpcReply::Runs { runs: false },
                RpcRequest::Open { .. } if accepts => RpcReply::Go { id: 1 },
                _ => {
                    let _ = sender.send(message);
                    continue;
                }
            };
            let reply = frame::pack(&reply, &[]).unwrap();
            client.publish(message.reply.unwrap(), reply).await.unwrap();
        }
    });
    kept
}

async fn forward(host: &Arc<Fleet>, method: Method, body: Body) -> Response {
    let request = Request::builder().method(method).uri("/execute").body(body).unwrap();
    match host.forward(SILENT, request, false).await {
        ForwardResult::Answered(response) => response,
        ForwardResult::NotThere(_) => panic!("a host listens"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_of_unknown_outcome_does_not_begin_after_its_answer() {
    let Some(server) = NatsServer::start() else { return };
    let (host, other) = (server.host().await, server.host().await);
    let counting = Arc::new(CountingHost::default());
    let attached: Arc<dyn FleetHost> = counting.clone();
    other.begin(&attached).await.unwrap();
    let mut kept = listen_silently(&host, false).await;
    let response = forward(&host, Method::POST, Body::from("{}")).await;
    // NATS has kept the message until now.
    let message = kept.recv().await.unwrap();
    let subject = other.links.subject(&format!("host.{}.call", other.node));
    let reply = host.links.client.request(subject, message.payload).await.unwrap();
    let (reply, _) = frame::unpack::<RpcReply>(&reply.payload).unwrap();
    assert!(matches!(reply, RpcReply::Late { .. }), "{reply:?}");
    assert_eq!(counting.0.load(Ordering::SeqCst), 0);
    assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_of_unknown_outcome_invites_no_second_try() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let mut kept = listen_silently(&host, false).await;
    let (write, read) = tokio::join!(
        forward(&host, Method::POST, Body::from("{}")),
        forward(&host, Method::GET, Body::empty())
    );
    assert_eq!(write.status(), StatusCode::GATEWAY_TIMEOUT);
    assert!(!write.headers().contains_key(RETRY_AFTER));
    let text = write.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8(text.to_vec()).unwrap();
    assert!(text.contains("its outcome is unknown"), "{text}");
    // A read executes nothing, whatever became of it.
    assert_eq!(read.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(read.headers().contains_key(RETRY_AFTER));
    assert!(kept.recv().await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_whose_pieces_are_lost_has_an_unknown_outcome() {
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    let mut kept = listen_silently(&host, true).await;
    let (sender, mut pieces) = mpsc::channel::<Bytes>(1);
    sender.send(Bytes::from_static(b"first")).await.unwrap();
    let pieces = futures_util::stream::poll_fn(move |context| pieces.poll_recv(context));
    let pieces = pieces.map(|piece| Ok::<_, std::convert::Infallible>(Frame::data(piece)));
    let sending = forward(&host, Method::POST, Body::new(StreamBody::new(pieces)));
    let rest = async {
        sender.send(Bytes::from_static(b"rest")).await.unwrap();
        kept.recv().await.unwrap()
    };
    let (response, message) = tokio::join!(sending, rest);
    let (call, _) = frame::unpack::<Call>(&message.payload).unwrap();
    assert!(matches!(call.request, RpcRequest::More { .. }), "{call:?}");
    assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
    assert!(!response.headers().contains_key(RETRY_AFTER));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_ending_leaves_requests_to_others() {
    let Some(server) = NatsServer::start() else { return };
    let (host, other) = (server.host().await, server.host().await);
    let attached: Arc<dyn FleetHost> = Arc::new(CountingHost::default());
    other.begin(&attached).await.unwrap();
    drop(attached);
    let request =
        Request::builder().method(Method::POST).uri("/execute").body(Body::from("{}")).unwrap();
    let forwarded = host.forward(&other.life(), request, false).await;
    let ForwardResult::NotThere(request) = forwarded else { panic!("it was answered") };
    assert_eq!(request.into_body().collect().await.unwrap().to_bytes(), "{}");
}
