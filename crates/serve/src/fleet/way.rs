//! Where a request is to be answered: here, or by which other host.
//!
//! What it promises: a sandbox is only asked for, and only taken, on behalf of somebody who may; a request goes to
//! the host that holds what it needs where there is one; it does not go round in circles.

use std::sync::Arc;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::{Request, StatusCode};

use super::forward::Asked;
use super::policy::Choice;
use super::{Fleet, lock};
use crate::config::GuestConfig;
use crate::refusal::Refusal;
use crate::sandbox::Sandboxes;
use crate::table::{below, without_port};

/// What is said of a guest's route among the things that a host holds.
const ROUTE: &str = "route:";
/// Hosts that one request is sent to before it is given up.
const HOPS: usize = 4;
/// Thousandths from which a host has others answer what they hold as well.
const BUSY: u32 = 900;
/// Most bytes of a request to make a sandbox, which has to be read to know where it goes.
const WANTED: usize = 1 << 20;

/// Where a request is answered.
pub(crate) enum Way {
    Here(Request<Body>),
    Answered(Response),
}

/// Whom a request about sandboxes is about.
pub(crate) enum About {
    /// One sandbox; what its owner demands is shown by the headers.
    Sandbox { id: String, inside: bool },
    /// A new one.
    New,
    /// None, or all.
    Other,
}

/// A guest's route as adverts have it.
pub(super) fn route_of(config: &GuestConfig) -> String {
    format!("{ROUTE}{}{}", config.host.as_deref().unwrap_or("*"), config.route)
}

impl Fleet {
    /// A route that another host serves, for a request that no guest of this host answers; or the route `own` if others
    /// serve it, too, and this host has enough to do.
    pub(crate) async fn guest_way(
        self: &Arc<Self>,
        own: Option<&GuestConfig>,
        request: Request<Body>,
    ) -> Way {
        let load = if own.is_some() { self.load() } else { 0 };
        if own.is_some() && load < BUSY {
            self.counts.held.inc();
            return Way::Here(request);
        }
        let route = match own {
            Some(own) => Some(route_of(own)),
            None => self.route(&request),
        };
        let Some(route) = route else { return Way::Here(request) };
        let chosen = {
            let members = lock(&self.members);
            let life = self.life();
            let choice = Choice { members: &members, own: own.map(|_| life.as_str()) };
            let chosen = choice.holder(&route, &mut lock(&self.random)).map(str::to_owned);
            chosen.filter(|chosen| *chosen != life)
        };
        let Some(chosen) = chosen else {
            self.counts.held.inc_by(u64::from(own.is_some()));
            return Way::Here(request);
        };
        self.counts.held.inc();
        self.counts.forwarded.inc();
        match self.forward(&chosen, request, false).await {
            Asked::Answered(response) => Way::Answered(response),
            Asked::NotThere(request) if own.is_some() => Way::Here(request),
            Asked::NotThere(_) => {
                let why = "the host that serves this path has just gone; try again";
                Way::Answered(Refusal::busy(StatusCode::SERVICE_UNAVAILABLE, why).into_response())
            }
        }
    }

    /// The longest route of any host for a request.
    fn route(&self, request: &Request<Body>) -> Option<String> {
        let host = request.headers().get(hyper::header::HOST).and_then(|host| host.to_str().ok());
        let host = request.uri().host().or(host).map(without_port);
        let members = lock(&self.members);
        let mut best: Option<(bool, usize, &str)> = None;
        for held in members.kinds().filter(|held| held.starts_with(ROUTE)) {
            let Some((whose, _)) = held[ROUTE.len()..].split_once('/') else { continue };
            let route = &held[ROUTE.len() + whose.len()..];
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
    pub(crate) async fn sandbox_way(
        self: &Arc<Self>,
        sandboxes: &Arc<Sandboxes>,
        about: About,
        request: Request<Body>,
    ) -> Way {
        let done = match about {
            About::Sandbox { id, inside } => self.to_sandbox(sandboxes, &id, inside, request).await,
            About::New => self.to_template(sandboxes, request).await,
            About::Other => Ok(Way::Here(request)),
        };
        done.unwrap_or_else(|refusal| Way::Answered(refusal.into_response()))
    }

    async fn to_sandbox(
        self: &Arc<Self>,
        sandboxes: &Arc<Sandboxes>,
        id: &str,
        inside: bool,
        mut request: Request<Body>,
    ) -> Result<Way, Refusal> {
        if super::entry::key(id).is_none() {
            return Ok(Way::Here(request));
        }
        for _ in 0..HOPS {
            if sandboxes.has(id) {
                sandboxes.check(id)?;
                self.counts.held.inc();
                return Ok(Way::Here(request));
            }
            // A host that is over is not asked again, whatever it was last known for.
            let known = lock(&self.ways).get(id).cloned().filter(|life| !self.is_over(life));
            let (life, take) = match known {
                Some(life) => (life, false),
                None => {
                    let Some(entry) = self.look_up(id).await? else {
                        return Ok(Way::Here(request));
                    };
                    let record = &entry.record;
                    if !sandboxes.may(request.headers(), record, inside) {
                        // Whoever it is for tells the client what it lacks, and nobody else learns what there is.
                        if inside && !record.paused {
                            let why = "the request does not show the sandbox's token";
                            return Err(Refusal::new(StatusCode::UNAUTHORIZED, why));
                        }
                        return Ok(Way::Here(request));
                    }
                    let owner =
                        entry.owner.filter(|owner| !self.is_over(owner) && *owner != self.life());
                    match owner {
                        Some(owner) => (owner, false),
                        None => {
                            (self.place_for(sandboxes, &entry.record, entry.state.as_ref()), true)
                        }
                    }
                }
            };
            if life == self.life() {
                match sandboxes.take(self, id).await? {
                    Some(other) => self.found(id, &other),
                    None => {
                        self.counts.held.inc();
                        return Ok(Way::Here(request));
                    }
                }
                continue;
            }
            self.counts.forwarded.inc();
            match self.forward(&life, request, take).await {
                Asked::Answered(response) => {
                    self.counts.held.inc();
                    self.found(id, &life);
                    return Ok(Way::Answered(response));
                }
                Asked::NotThere(back) => {
                    request = back;
                    lock(&self.ways).remove(id);
                    // It may have a lease still, and then nobody may take what it has.
                    if !take && !self.free(Some(&life)).await {
                        let there = self.look_up(id).await?.and_then(|entry| entry.owner);
                        if there.as_deref() == Some(&life) {
                            break;
                        }
                    }
                }
            }
        }
        Err(Refusal::busy(
            StatusCode::SERVICE_UNAVAILABLE,
            "the host that has the sandbox does not answer, and it is not given up yet; try again",
        ))
    }

    /// Who takes a sandbox that nobody has: who saved it last, else who holds its template.
    fn place_for(
        &self,
        sandboxes: &Sandboxes,
        record: &crate::sandbox::SandboxRecord,
        state: Option<&super::State>,
    ) -> String {
        let own = self.life();
        let members = lock(&self.members);
        let near = state.and_then(|state| members.get(&state.by));
        if let Some(near) = near.filter(|near| !near.advert.draining && near.advert.load < BUSY) {
            return near.advert.host.clone();
        }
        let template = sandboxes.digest_of(&record.template);
        let choice = Choice { members: &members, own: Some(&own) };
        let chosen = choice.host(&template, &mut lock(&self.random)).map(str::to_owned);
        chosen.unwrap_or(own)
    }

    async fn to_template(
        self: &Arc<Self>,
        sandboxes: &Arc<Sandboxes>,
        request: Request<Body>,
    ) -> Result<Way, Refusal> {
        // Who is not known is told so here.
        let Some(tenant) = sandboxes.config.keys.tenant(request.headers()) else {
            return Ok(Way::Here(request));
        };
        let (parts, body) = request.into_parts();
        let body = http_body_util::Limited::new(body, WANTED).collect().await;
        let body: Bytes = match body {
            Ok(body) => body.to_bytes(),
            Err(error) => return Err(Refusal::new(StatusCode::BAD_REQUEST, error.to_string())),
        };
        let named: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
        let name =
            named.as_ref().and_then(|named| named["templateID"].as_str()).unwrap_or_default();
        let held = sandboxes.held_for(self, &tenant, name).await?;
        let request = Request::from_parts(parts, Body::from(body));
        let own = self.life();
        let (chosen, holds) = {
            let members = lock(&self.members);
            let choice = Choice { members: &members, own: Some(&own) };
            let mut random = lock(&self.random);
            let chosen = choice.host(&held, &mut random).map(str::to_owned);
            let holds =
                chosen.as_ref().is_some_and(|chosen| members.holders(&held).contains(chosen));
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
                Err(Refusal::busy(StatusCode::SERVICE_UNAVAILABLE, why))
            }
            None => Ok(Way::Here(request)),
            Some(chosen) => {
                self.counts.forwarded.inc();
                match self.forward(&chosen, request, false).await {
                    Asked::Answered(response) => Ok(Way::Answered(response)),
                    Asked::NotThere(request) => Ok(Way::Here(request)),
                }
            }
        }
    }
}
