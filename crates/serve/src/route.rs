//! A guest under its route: from a request to its answer, within the guest's budget.
//!
//! Promises: the body is read before a place is taken, so slow clients hold no place; a request
//! over a limit is refused and counted; a guest's failure is logged, and not shown to clients.

use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh::Guest;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::Body as HttpBody;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, Request};
use tracing::Instrument;

use crate::body::{self, BodyLimits, BodyMetering, LimitedBody};
use crate::budget::Budget;
use crate::concurrency::{ConcurrencyLimiter, Permit, Share};
use crate::config::GuestConfig;
use crate::error_response::ErrorResponse;
use crate::failure::Failure;
use crate::metrics::{GuestMetrics, Metrics};
use crate::pool_metrics::PoolMetrics;
use crate::runner::Runner;
use crate::span::REQUEST_ID;
use crate::{span, wire};

/// A guest under its route.
pub(crate) struct Route {
    pub(crate) config: GuestConfig,
    pub(crate) guest: Guest,
    runner: Runner,
    content_type: HeaderValue,
    pub(crate) metrics: Arc<GuestMetrics>,
    pub(crate) pool: PoolMetrics,
    limits: BodyLimits,
    /// Its line at the gate.
    pub(crate) line: usize,
    /// For the bytes of its requests and answers.
    budget: Budget,
}

impl Drop for Route {
    fn drop(&mut self) {
        // The last request has ended by now, of a guest that was exchanged long ago perhaps.
        self.pool.end(self.guest.pool_stats());
    }
}

impl Route {
    pub(crate) async fn open(
        config: &GuestConfig,
        line: usize,
        budget: Budget,
        body_time: std::time::Duration,
        metrics: &Metrics,
    ) -> Result<Self, afresh::Cause> {
        let (guest, runner) = Runner::open(config).await?;
        let strategy = guest.strategy();
        let about = (runner.kind(), runner.mode(), strategy.as_str());
        Ok(Self {
            pool: PoolMetrics::new(&metrics.pools, &config.name, about),
            content_type: HeaderValue::from_str(&config.content_type)?,
            metrics: Arc::new(metrics.guest(&config.name)),
            limits: BodyLimits { bytes: config.max_body, time: body_time },
            config: config.clone(),
            guest,
            runner,
            line,
            budget,
        })
    }

    pub(crate) fn share(config: &GuestConfig) -> Share {
        Share {
            running: config.max_concurrent_requests.max(1),
            waiting: config.max_waiting_requests,
            weight: 1,
        }
    }

    /// The kind of guest, for people.
    pub(crate) fn kind(&self) -> &'static str {
        self.runner.kind()
    }

    /// Whether an instance is reset for the next call, or made anew.
    pub(crate) fn mode(&self) -> &'static str {
        self.runner.mode()
    }

    pub(crate) fn sweep(&self) {
        self.runner.sweep();
    }

    /// Answers a request, in one way or another.
    pub(crate) async fn answer<B>(
        &self,
        request: Request<B>,
        gate: &Arc<ConcurrencyLimiter>,
    ) -> Response
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: std::fmt::Display,
    {
        let started = Instant::now();
        span::route(request.method(), || self.config.route.clone());
        let answer = self.try_answer(request, gate).await;
        let response = answer.unwrap_or_else(IntoResponse::into_response);
        self.metrics.ended(response.status().as_u16(), started.elapsed().as_secs_f64());
        response
    }

    async fn try_answer<B>(
        &self,
        request: Request<B>,
        gate: &Arc<ConcurrencyLimiter>,
    ) -> Result<Response, ErrorResponse>
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: std::fmt::Display,
    {
        let id = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
        let id = id.unwrap_or_default().to_owned();
        if let Runner::Proxy(proxy) = &self.runner {
            if request.body().size_hint().lower() > self.limits.bytes as u64 {
                return Err(ErrorResponse::too_large(self.limits.bytes));
            }
            let (pass, left) = self.enter(gate).await?;
            let request =
                request.map(|body| LimitedBody::new(body, self.limits, BodyMetering::Not));
            let (guest, metrics) = (self.config.name.clone(), self.metrics.clone());
            let report = move |failure: &Failure| {
                tracing::warn!(guest, %failure, "an answer was broken off");
                metrics.failed(failure.kind());
            };
            let answering = proxy.answer(&id, request, left, pass, report).instrument(self.call());
            return answering.await.map_err(|error| self.refused(error));
        }
        let mut share = self.budget.share();
        let (parts, body) = request.into_parts();
        let mut input = body::read(body, self.limits, &mut share).await?;
        if self.runner.listens() {
            input = wire::request(&parts, &input).into();
        }
        let (pass, left) = self.enter(gate).await?;
        let answering = self.runner.answer(&id, input, left, (pass, share)).instrument(self.call());
        let (answer, (pass, mut share)) = answering.await.map_err(|error| self.refused(error))?;
        drop(pass);
        if !share.add(answer.len()) {
            return Err(ErrorResponse::no_memory());
        }
        if self.runner.listens() {
            let (status, headers, body) =
                wire::answer(&parts.method, &answer).ok_or_else(|| {
                    self.refused(Failure::Guest(
                        "the program's answer is not HTTP, or is incomplete".to_owned(),
                    ))
                })?;
            let body = Body::from(body::count_until_dropped(Bytes::from(body), share));
            return Ok((status, headers, body).into_response());
        }
        let body = body::count_until_dropped(Bytes::from(answer), share);
        let mut headers = HeaderMap::with_capacity(2);
        headers.insert(CONTENT_TYPE, self.content_type.clone());
        Ok((headers, Body::from(body)).into_response())
    }

    /// Waits for a place, and returns the remaining time.
    async fn enter(
        &self,
        gate: &Arc<ConcurrencyLimiter>,
    ) -> Result<(Permit, Duration), ErrorResponse> {
        let waiting = Instant::now();
        let pass = gate.enter(self.line, self.config.timeout).await?;
        Ok((pass, self.config.timeout.saturating_sub(waiting.elapsed())))
    }

    /// The time in which the guest works on an answer.
    fn call(&self) -> tracing::Span {
        let name = self.config.name.as_str();
        tracing::debug_span!("call", afresh.guest = name, afresh.mode = self.mode())
    }

    fn refused(&self, failure: Failure) -> ErrorResponse {
        tracing::warn!(guest = self.config.name, %failure, "no answer");
        self.metrics.failed(failure.kind());
        failure.into()
    }
}
