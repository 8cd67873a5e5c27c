//! Routing of a request to this host or another one.
//!
//! Promises: a sandbox is only looked up and taken for a client with its key or token. A request
//! goes to a host that holds the guest or the template, if one exists, and does not run in circles.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{Request, StatusCode};
use serde::Deserialize;

use super::Fleet;
use super::locations::{SandboxLocation, charge_tenant};
use super::policy::Placement;
use super::rpc_client::ForwardResult;
use crate::body::{BodyLimits, BodyMetering, LimitedBody, Meter, count_until_dropped};
use crate::config::GuestConfig;
use crate::error_response::ErrorResponse;
use crate::lock::lock;
use crate::routing_table::{below, without_port};
use crate::sandbox::records::store::{
    RouteSubject, SandboxAccess, SandboxHost, SandboxRecord, SandboxStore, State,
};

/// Prefix of a route in the list of things that a host holds.
const ROUTE_PREFIX: &str = "route:";
/// Prefix of a template name in the list of things that a host holds.
const TEMPLATE_PREFIX: &str = "template:";
/// Hosts that one request is sent to before it is given up.
const MAX_HOPS: usize = 4;
/// Thousandths of load from which a host forwards requests that other holders can answer.
const BUSY_LOAD: u32 = 900;
/// Maximum bytes of a request for a new sandbox, whose body is read before it is routed.
const MAX_CREATE_BODY: usize = 1 << 20;

/// The template of a request for a new sandbox. Other fields are skipped, not kept.
#[derive(Deserialize)]
struct NamedTemplate<'a> {
    #[serde(rename = "templateID", borrow, default)]
    name: Cow<'a, str>,
}

/// The routing of a request.
pub(crate) enum RouteDecision {
    Here(Request<Body>),
    Answered(Response),
}

/// A template in the form of adverts.
pub(super) fn template_of(name: &str) -> String {
    format!("{TEMPLATE_PREFIX}{name}")
}

/// A guest's route in the form of adverts.
pub(crate) fn route_of(config: &GuestConfig) -> String {
    format!("{ROUTE_PREFIX}{}{}", config.host.as_deref().unwrap_or("*"), config.route)
}

/// The answer where a sandbox needs a template that no host has.
pub(super) fn no_template(name: &str) -> ErrorResponse {
    let why = format!(
        "no host that answers has the template `{name}`, which the sandbox was made from; start one that has"
    );
    ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why)
}

impl Fleet {
    /// A route that another host serves, for a request that no guest of this host answers; or the
    /// route `own` if others also serve it, and this host is busy.
    pub(crate) async fn route_guest(
        self: &Arc<Self>,
        own: Option<&GuestConfig>,
        request: Request<Body>,
    ) -> RouteDecision {
        let load = if own.is_some() { self.load() } else { 0 };
        if own.is_some() && load < BUSY_LOAD {
            self.counts.held.inc();
            return RouteDecision::Here(request);
        }
        let route = match own {
            Some(own) => Some(route_of(own)),
            None => self.route(&request),
        };
        let Some(route) = route else { return RouteDecision::Here(request) };
        let chosen = {
            let members = lock(&self.members);
            let life = self.life();
            let choice = Placement { members: &members, own: own.map(|_| life.as_str()) };
            let chosen = choice.holder(&route, &mut lock(&self.random)).map(str::to_owned);
            chosen.filter(|chosen| *chosen != life)
        };
        let Some(chosen) = chosen else {
            self.counts.held.inc_by(u64::from(own.is_some()));
            return RouteDecision::Here(request);
        };
        self.counts.held.inc();
        self.counts.forwarded.inc();
        match self.forward(&chosen, request, false).await {
            ForwardResult::Answered(response) => RouteDecision::Answered(response),
            ForwardResult::NotThere(request) if own.is_some() => RouteDecision::Here(request),
            ForwardResult::NotThere(_) => {
                let why = "the host that serves this path has left; try again";
                RouteDecision::Answered(
                    ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why).into_response(),
                )
            }
        }
    }

    /// The longest route of any host for a request.
    fn route(&self, request: &Request<Body>) -> Option<String> {
        let host = request.headers().get(hyper::header::HOST).and_then(|host| host.to_str().ok());
        let host = request.uri().host().or(host).map(without_port);
        let members = lock(&self.members);
        let mut best: Option<(bool, usize, &str)> = None;
        for held in members.kinds(ROUTE_PREFIX) {
            let Some((whose, _)) = held[ROUTE_PREFIX.len()..].split_once('/') else { continue };
            let route = &held[ROUTE_PREFIX.len() + whose.len()..];
            let ours = whose != "*";
            let fits = !ours || host.is_some_and(|host| host.eq_ignore_ascii_case(whose));
            if fits && below(request.uri().path(), route) {
                let this = (ours, route.len(), held);
                best = Some(best.map_or(this, |best| best.max(this)));
            }
        }
        best.map(|(_, _, held)| held.to_owned())
    }

    /// Where a request about sandboxes is answered.
    pub(crate) async fn route_sandbox(
        self: &Arc<Self>,
        sandboxes: &dyn SandboxHost,
        about: RouteSubject,
        request: Request<Body>,
    ) -> RouteDecision {
        let done = match about {
            RouteSubject::Sandbox { id, inside } => {
                self.to_sandbox(sandboxes, &id, inside, request).await
            }
            RouteSubject::New => self.to_template(sandboxes, request).await,
            RouteSubject::Other => Ok(RouteDecision::Here(request)),
        };
        done.unwrap_or_else(|refusal| RouteDecision::Answered(refusal.into_response()))
    }

    async fn to_sandbox(
        self: &Arc<Self>,
        sandboxes: &dyn SandboxHost,
        id: &str,
        inside: bool,
        mut request: Request<Body>,
    ) -> Result<RouteDecision, ErrorResponse> {
        if super::record::key(id).is_none() {
            return Ok(RouteDecision::Here(request));
        }
        let mut access = None;
        for _ in 0..MAX_HOPS {
            if sandboxes.has(id) {
                sandboxes.check(id)?;
                self.counts.held.inc();
                return Ok(RouteDecision::Here(request));
            }
            // A host whose life is over gets no more requests, despite earlier entries for it.
            let known = lock(&self.locations).get(id).filter(|known| !self.is_over(&known.life));
            let (life, take) = match known {
                Some(known) => {
                    if let Some(known) = known.access {
                        charge_tenant(sandboxes, &request, &known, inside);
                        access = Some(known);
                    }
                    (known.life, false)
                }
                None => {
                    let Some(entry) = self.look_up(id).await? else {
                        return Ok(RouteDecision::Here(request));
                    };
                    let record = &entry.record;
                    if !sandboxes.permits(&request, record, inside) {
                        // Only a client of a sandbox that runs, or that a request resumes, learns
                        // that its token is wrong.
                        if inside && (!record.paused || record.settings.auto_resume) {
                            return Err(sandboxes.no_token(request.headers(), id));
                        }
                        return Ok(RouteDecision::Here(request));
                    }
                    // Its body may wait for the other host with all of its bytes.
                    let read = Arc::new(SandboxAccess::of(record));
                    charge_tenant(sandboxes, &request, &read, inside);
                    access = Some(read);
                    let owner =
                        entry.owner.filter(|owner| !self.is_over(owner) && *owner != self.life());
                    match owner {
                        Some(owner) => (owner, false),
                        None => {
                            let state = entry.state.as_ref();
                            if let Some(state) = state {
                                self.learn(&state.by).await;
                            }
                            (self.place_for(sandboxes, &entry.record, state)?, true)
                        }
                    }
                }
            };
            if life == self.life() {
                match self.take_here(sandboxes, id).await? {
                    Some(life) => {
                        let access = access.clone();
                        self.note_location(id, SandboxLocation { life, access });
                    }
                    None => {
                        self.counts.held.inc();
                        return Ok(RouteDecision::Here(request));
                    }
                }
                continue;
            }
            self.counts.forwarded.inc();
            match self.forward(&life, request, take).await {
                ForwardResult::Answered(response) => {
                    self.counts.held.inc();
                    self.note_location(id, SandboxLocation { life, access });
                    return Ok(RouteDecision::Answered(response));
                }
                ForwardResult::NotThere(back) => {
                    request = back;
                    lock(&self.locations).remove(id);
                    // Its lease may still hold, and then its sandboxes cannot be taken.
                    if !take && !self.free(Some(&life)).await {
                        let there = self.look_up(id).await?.and_then(|entry| entry.owner);
                        if there.as_deref() == Some(&life) {
                            break;
                        }
                    }
                }
            }
        }
        Err(ErrorResponse::busy(
            StatusCode::SERVICE_UNAVAILABLE,
            "the host that has the sandbox does not answer, and it is not given up yet; try again",
        ))
    }

    /// The host that takes a sandbox without an owner: the one that saved it last, else one with
    /// little to do. Only hosts with its template can run it.
    fn place_for(
        &self,
        sandboxes: &dyn SandboxHost,
        record: &SandboxRecord,
        state: Option<&State>,
    ) -> Result<String, ErrorResponse> {
        let own = self.life();
        let held = template_of(&record.template);
        let members = lock(&self.members);
        let holders = members.holders(&held);
        let near = state.and_then(|state| members.get(&state.by));
        let near = near.filter(|near| !near.advert.draining && near.advert.load < BUSY_LOAD);
        if let Some(near) = near.filter(|near| members.is_holder(&near.advert.host, &held)) {
            return Ok(near.advert.host.clone());
        }
        let choice = Placement { members: &members, own: Some(&own) };
        let chosen = choice.holder(&held, &mut lock(&self.random));
        if let Some(chosen) = chosen {
            return Ok(chosen.to_owned());
        }
        if sandboxes.has_template(&record.template) {
            return Ok(own);
        }
        // All of them are full or ending; one of them returns the error.
        holders.first().cloned().ok_or_else(|| no_template(&record.template))
    }

    /// The source that a host should hold to make a sandbox of this template or snapshot.
    async fn source_of(
        &self,
        sandboxes: &dyn SandboxHost,
        tenant: &str,
        name: &str,
    ) -> Result<String, ErrorResponse> {
        if let Some(digest) = sandboxes.template_digest(Some(name)) {
            return Ok(digest);
        }
        let snapshot = self.snapshot(tenant, name).await?;
        let id = snapshot.map(|snapshot| snapshot.record.id);
        Ok(id.or_else(|| sandboxes.template_digest(None)).unwrap_or_default())
    }

    async fn to_template(
        self: &Arc<Self>,
        sandboxes: &dyn SandboxHost,
        request: Request<Body>,
    ) -> Result<RouteDecision, ErrorResponse> {
        // An unknown client is refused here.
        let Some(tenant) = sandboxes.tenant(request.headers()) else {
            return Ok(RouteDecision::Here(request));
        };
        if let Some(meter) = request.extensions().get::<Meter>() {
            meter.set_tenant(Some(&tenant));
        }
        let meter = request.extensions().get::<Meter>().cloned();
        let (parts, body) = request.into_parts();
        let body = http_body_util::Limited::new(body, MAX_CREATE_BODY).collect().await;
        let mut body: Bytes = match body {
            Ok(body) => body.to_bytes(),
            Err(error) => {
                return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, error.to_string()));
            }
        };
        // A body of several pieces was copied, and the copy is counted nowhere yet.
        if let Some(meter) = &meter {
            let mut share = meter.budget().share();
            if !share.add(body.len()) {
                return Err(ErrorResponse::no_memory());
            }
            body = count_until_dropped(body, share);
        }
        let named: Option<NamedTemplate<'_>> = serde_json::from_slice(&body).ok();
        let name = named.map(|named| named.name).unwrap_or_default();
        let held = self.source_of(sandboxes, &tenant, &name).await?;
        drop(name);
        // It is here as a whole. The handler of this host decodes it, which takes several times its
        // bytes.
        let body = match meter {
            Some(meter) => {
                let limits = BodyLimits { bytes: MAX_CREATE_BODY, time: Duration::ZERO };
                Body::new(LimitedBody::new(Body::from(body), limits, BodyMetering::Whole(meter)))
            }
            None => Body::from(body),
        };
        let request = Request::from_parts(parts, body);
        let own = self.life();
        let (chosen, holds) = {
            let members = lock(&self.members);
            let choice = Placement { members: &members, own: Some(&own) };
            let mut random = lock(&self.random);
            let chosen = choice.host(&held, &mut random).map(str::to_owned);
            let holds = chosen.as_ref().is_some_and(|chosen| members.is_holder(chosen, &held));
            (chosen, holds)
        };
        if holds {
            self.counts.held.inc()
        } else {
            self.counts.elsewhere.inc()
        };
        let draining = self.draining.load(std::sync::atomic::Ordering::Relaxed);
        match chosen.filter(|chosen| *chosen != own) {
            None if draining => {
                let why = "this host is ending, and knows no other; try again";
                Err(ErrorResponse::busy(StatusCode::SERVICE_UNAVAILABLE, why))
            }
            None => Ok(RouteDecision::Here(request)),
            Some(chosen) => {
                self.counts.forwarded.inc();
                match self.forward(&chosen, request, false).await {
                    ForwardResult::Answered(response) => Ok(RouteDecision::Answered(response)),
                    ForwardResult::NotThere(request) => Ok(RouteDecision::Here(request)),
                }
            }
        }
    }
}
