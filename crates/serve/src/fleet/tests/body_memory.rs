//! The memory of bodies that this host sends on to other hosts.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper::{HeaderMap, Request};

use super::NatsServer;
use super::sweep::{sandbox, saved};
use crate::body::{BodyLimits, BodyMetering, LimitedBody, Meter};
use crate::body_shares::BodyShares;
use crate::budget::{Budget, Share};
use crate::error_response::ErrorResponse;
use crate::fleet::locations::SandboxLocation;
use crate::fleet::{Fleet, RouteDecision};
use crate::sandbox::records::store::{
    OwnedEntry, RouteSubject, SandboxAccess, SandboxHost, SandboxRecord, StoredSandbox, TenantUse,
};

const MEMORY: usize = 4096;
/// The header of a key, which names its tenant here, and of a token.
const PROOF: &str = "proof";

/// A host without sandboxes. A request proves the tenant or the token that it names.
struct EmptyHost;

fn read_proof(headers: &HeaderMap) -> Option<&str> {
    headers.get(PROOF).and_then(|shown| shown.to_str().ok())
}

impl SandboxHost for EmptyHost {
    fn has(&self, _: &str) -> bool {
        false
    }

    fn check(&self, _: &str) -> Result<(), ErrorResponse> {
        Ok(())
    }

    fn proves(&self, request: &Request<Body>, access: &SandboxAccess, inside: bool) -> bool {
        read_proof(request.headers()) == Some(if inside { &access.token } else { &access.tenant })
    }

    fn is_for_port(&self, _: &HeaderMap) -> bool {
        false
    }

    fn no_token(&self, _: &HeaderMap, _: &str) -> ErrorResponse {
        ErrorResponse::new(hyper::StatusCode::UNAUTHORIZED, "no proof")
    }

    fn tenant(&self, headers: &HeaderMap) -> Option<Arc<str>> {
        read_proof(headers).map(Arc::from)
    }

    fn templates(&self) -> Vec<String> {
        Vec::new()
    }

    fn has_template(&self, _: &str) -> bool {
        false
    }

    fn template_digest(&self, _: Option<&str>) -> Option<String> {
        None
    }

    fn held_sources(&self) -> Vec<String> {
        Vec::new()
    }

    fn busy(&self) -> (usize, usize) {
        (0, 1)
    }

    fn live(&self) -> usize {
        0
    }

    fn tenant_uses(&self) -> Vec<(Arc<str>, TenantUse)> {
        Vec::new()
    }

    fn adopt(&self, _: SandboxRecord, _: OwnedEntry, _: &dyn Fn() -> bool) {}

    fn doubt_all(&self) {}

    fn doubtful(&self) -> Vec<Arc<dyn StoredSandbox>> {
        Vec::new()
    }

    fn confirm(&self, _: &dyn StoredSandbox, _: &dyn Fn() -> bool) {}

    fn give_up(&self, _: &str) {}
}

/// The memory for bodies. Requests without a tenant have taken their part.
fn shares() -> (Arc<BodyShares>, Share) {
    let shares = BodyShares::new(&Budget::new(MEMORY));
    let mut strangers = shares.of(None).share();
    assert!(strangers.add(MEMORY / 4));
    (shares, strangers)
}

/// Routes a request with a body. Whether its bytes have room afterwards.
async fn has_room(
    host: &Arc<Fleet>,
    shares: &Arc<BodyShares>,
    about: RouteSubject,
    proof: Option<&str>,
) -> bool {
    let meter = Meter::new(shares, 1);
    let limits = BodyLimits { bytes: MEMORY, time: Duration::from_secs(600) };
    let body = Body::from(Bytes::from_static(b"{}"));
    let body = LimitedBody::new(body, limits, BodyMetering::Whole(meter.clone()));
    let mut request = Request::new(Body::new(body));
    if let Some(proof) = proof {
        request.headers_mut().insert(PROOF, proof.parse().unwrap());
    }
    request.extensions_mut().insert(meter.clone());
    match host.route_sandbox(&EmptyHost, about, request).await {
        RouteDecision::Here(_) | RouteDecision::Answered(_) => meter.add(1),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_sent_on_counts_for_the_tenant_whose_key_or_token_it_shows() {
    let Some(server) = NatsServer::start() else { return };
    let (host, owner) = (server.host().await, server.host().await);
    let record = sandbox(600_000);
    saved(&owner, &record).await;
    let (shares, _strangers) = shares();
    let about = |inside| RouteSubject::Sandbox { id: record.id.clone(), inside };
    // The entry is read, and then the location is known.
    for known in [false, true] {
        if known {
            let access = Some(Arc::new(SandboxAccess::of(&record)));
            host.note_location(&record.id, SandboxLocation { life: owner.life(), access });
        }
        for (inside, proof) in [(false, &record.tenant), (true, &record.token)] {
            assert!(has_room(&host, &shares, about(inside), Some(proof)).await, "{known} {inside}");
            assert!(!has_room(&host, &shares, about(inside), Some("wrong")).await);
            assert!(!has_room(&host, &shares, about(inside), None).await);
        }
    }
    assert!(has_room(&host, &shares, RouteSubject::New, Some("acme")).await);
    assert!(!has_room(&host, &shares, RouteSubject::New, None).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_for_a_sandbox_here_counts_for_what_is_decoded_from_it() {
    const WEIGHT: usize = 40;
    let Some(server) = NatsServer::start() else { return };
    let host = server.host().await;
    for (bytes, fits) in [(40, true), (200, false)] {
        let shares = BodyShares::new(&Budget::new(MEMORY));
        let meter = Meter::new(&shares, WEIGHT);
        let limits = BodyLimits { bytes: MEMORY, time: Duration::from_secs(600) };
        // It comes in two pieces, and is sent on as one.
        let mut text = br#"{"templateID":"a","other":[[0]]}"#.to_vec();
        text.resize(bytes, b' ');
        let pieces = [text[..9].to_vec(), text[9..].to_vec()].map(Bytes::from);
        let frames = pieces.map(|piece| Ok::<_, std::convert::Infallible>(Frame::data(piece)));
        let body = StreamBody::new(futures_util::stream::iter(frames));
        let body = LimitedBody::new(body, limits, BodyMetering::Whole(meter.clone()));
        let mut request = Request::new(Body::new(body));
        request.headers_mut().insert(PROOF, "acme".parse().unwrap());
        request.extensions_mut().insert(meter.clone());
        let way = host.route_sandbox(&EmptyHost, RouteSubject::New, request).await;
        let RouteDecision::Here(request) = way else { panic!("it is for this host") };
        meter.keep();
        let read = request.into_body().collect().await;
        assert_eq!((read.is_ok(), meter.is_exceeded()), (fits, !fits), "{bytes}");
    }
}
