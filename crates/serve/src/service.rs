//! From a request to its answer: its receiver, its number, and the server's own paths.

use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::Body as HttpBody;
use http_body_util::BodyExt;
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, StatusCode};
use tokio::sync::watch;
use tracing::Instrument;

use crate::address_limits::{AddressConfig, AddressLimits, CLIENT, client_address};
use crate::audit::AuditLog;
use crate::body::{
    BodyLimits, BodyMetering, LimitedBody, Meter, MeteredBody, StreamedAnswer, count_until_dropped,
};
use crate::body_shares::BodyShares;
use crate::budget::Budget;
use crate::config::Config;
use crate::error::ServeError;
use crate::error_response::ErrorResponse;
#[cfg(feature = "fleet")]
use crate::fleet::{Fleet, FleetHost, RouteDecision, route_of};
use crate::health::{self, Health};
use crate::metrics::Metrics;
use crate::reload::settings_for_restart;
use crate::request_ids::RequestIds;
use crate::routing_table::RoutingTable;
use crate::sandbox::catalog::template::Warm;
#[cfg(feature = "fleet")]
use crate::sandbox::records::store::{RouteSubject, SandboxHost, SandboxStore};
use crate::sandbox::{Routes, Sandboxes, Scope};
use crate::span;
use crate::span::REQUEST_ID;
use crate::status::Viewer;

/// Paths that the server answers itself.
const OPERATIONS: [&str; 6] =
    ["/healthz", "/readyz", "/status", "/status.json", "/status/pages.json", "/metrics"];

/// The progress of the end of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub(crate) enum Phase {
    /// It takes connections.
    Running,
    /// It takes them, but announces on each answer that it closes them.
    Draining,
    /// It takes none, and ends those that have nothing under way.
    Closing,
}

/// The clients of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// Guests, and the server's own operations unless those have another listener.
    Requests { operations: bool },
    /// Requests to the server only.
    Operations,
}

/// State that all connections of a server share.
pub(crate) struct ServerState {
    /// The configuration that it was started with.
    config: Config,
    table: RwLock<Arc<RoutingTable>>,
    pub(crate) budget: Budget,
    /// The part of the budget that guests under routes have.
    guest_budget: Budget,
    body_shares: Arc<BodyShares>,
    pub(crate) metrics: Metrics,
    pub(crate) phase: watch::Sender<Phase>,
    /// The routes of sandboxes.
    pub(crate) sandboxes: Option<Routes>,
    audit: Option<Arc<AuditLog>>,
    pub(crate) addresses: Arc<AddressLimits>,
    /// A proxy in front names the clients.
    is_forwarded: bool,
    #[cfg(feature = "fleet")]
    pub(crate) fleet: Option<Arc<Fleet>>,
    #[cfg(feature = "tls")]
    pub(crate) tls: Option<crate::tls::Acceptor>,
    body_time: Duration,
    ids: RequestIds,
    pub(crate) health: Health,
}

/// The parts that a reload exchanges.
struct OpenedGuests {
    table: RoutingTable,
    templates: Option<Vec<Arc<Warm>>>,
    #[cfg(feature = "tls")]
    tls: Option<crate::tls::Acceptor>,
}

/// Counts the retained bytes of an answer about sandboxes: all of them if they are there already,
/// or piece by piece.
async fn hold(response: Response, method: &Method, meter: &Meter) -> Response {
    let (parts, body) = response.into_parts();
    if parts.extensions.get::<StreamedAnswer>().is_some() {
        return Response::from_parts(parts, Body::new(MeteredBody::new(body, meter.budget())));
    }
    let bytes = match body.collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => {
            tracing::error!(%error, "an answer about a sandbox broke off");
            return ErrorResponse::host().into_response();
        }
    };
    let mut share = meter.budget().share();
    if !share.add(bytes.len()) {
        let has_run = parts.status.is_success() && !method.is_safe();
        let refusal = match has_run {
            true => ErrorResponse::no_answer_memory(),
            false => ErrorResponse::no_memory(),
        };
        return refusal.into_response();
    }
    Response::from_parts(parts, Body::from(count_until_dropped(bytes, share)))
}

impl ServerState {
    pub(crate) async fn open(config: &Config) -> Result<Self, ServeError> {
        let budget = Budget::new(config.max_buffered_bytes);
        // Guests under routes have as much together as a tenant of sandboxes.
        let guest_budget = match config.sandboxes {
            Some(_) => budget.part(1),
            None => budget.clone(),
        };
        let mut metrics = Metrics::new();
        let table = RoutingTable::open(config, &guest_budget, &metrics).await?;
        #[cfg(feature = "fleet")]
        let fleet = match &config.fleet {
            Some(fleet) => Some(Fleet::join(fleet).await?),
            None => None,
        };
        let audit = match &config.audit {
            Some(audit) => {
                let path = audit.path.clone();
                let opened = AuditLog::open(audit);
                Some(Arc::new(opened.map_err(|source| ServeError::Audit { path, source })?))
            }
            None => None,
        };
        let sandboxes = match &config.sandboxes {
            Some(sandboxes) => {
                #[cfg(feature = "fleet")]
                let ledger = fleet.clone().map(|fleet| fleet as Arc<dyn SandboxStore>);
                #[cfg(not(feature = "fleet"))]
                let ledger = None;
                let opened = Sandboxes::open(sandboxes, audit.clone(), ledger);
                Some(Routes::new(opened.await?))
            }
            None => None,
        };
        #[cfg(feature = "fleet")]
        if let Some(fleet) = &fleet {
            metrics.count_fleet(&fleet.counts);
        }
        if let Some(audit) = &audit {
            metrics.count_audit(audit);
        }
        #[cfg(feature = "otel")]
        if let Some(traces) = &config.traces {
            metrics.count_traces(&traces.0);
        }
        #[cfg(feature = "tls")]
        let tls = config.tls.as_ref().map(crate::tls::Acceptor::open).transpose()?;
        Ok(Self {
            config: config.clone(),
            #[cfg(feature = "tls")]
            tls,
            sandboxes,
            audit,
            addresses: AddressLimits::new(AddressConfig {
                connections: config.max_connections_per_address,
                requests: config.max_requests_per_address,
            }),
            is_forwarded: config.forwarded_for,
            #[cfg(feature = "fleet")]
            fleet,
            table: RwLock::new(Arc::new(table)),
            body_shares: BodyShares::new(&budget),
            budget,
            guest_budget,
            metrics,
            phase: watch::Sender::new(Phase::Running),
            body_time: config.body_timeout,
            ids: RequestIds::new(),
            health: Health::default(),
        })
    }

    /// Exchanges the guests, the keys and the certificate. Requests that are under way end with
    /// those they began with.
    pub(crate) async fn reload(&self, config: &Config) -> Result<(), ServeError> {
        self.begin_reload();
        match self.open_again(config).await {
            Ok(opened) => {
                let left = settings_for_restart(&self.config, config);
                if !left.is_empty() {
                    let settings = left.join(", ");
                    tracing::warn!(
                        settings,
                        "these settings change when the server is started again"
                    );
                }
                if let (Some(routes), Some(new)) = (&self.sandboxes, &config.sandboxes) {
                    routes.sandboxes.renew(new);
                    opened
                        .templates
                        .into_iter()
                        .for_each(|new| routes.sandboxes.replace_templates(new));
                }
                #[cfg(feature = "tls")]
                if let (Some(tls), Some(new)) = (&self.tls, &opened.tls) {
                    tls.renew(new);
                }
                let mut place = self.table.write().unwrap_or_else(PoisonError::into_inner);
                let old = std::mem::replace(&mut *place, Arc::new(opened.table));
                drop(place);
                drop(old);
                self.end_reload(true);
                Ok(())
            }
            Err(error) => {
                self.end_reload(false);
                Err(error)
            }
        }
    }

    /// Opens the audit log again, whatever becomes of the reload: its file may have been rotated.
    pub(crate) fn begin_reload(&self) {
        if let Some(audit) = &self.audit {
            audit.reopen();
        }
    }

    /// Waits for the lines of the audit log, for a limited time.
    pub(crate) async fn flush_audit(&self) {
        if let Some(audit) = &self.audit {
            audit.flush().await;
        }
    }

    /// Records and counts a reload.
    pub(crate) fn end_reload(&self, is_done: bool) {
        if let Some(audit) = &self.audit {
            audit.record_server("reload", is_done);
        }
        match is_done {
            true => self.metrics.reloads.inc(),
            false => self.metrics.failed_reloads.inc(),
        };
    }

    /// Opens all exchanged parts, so that an error in one leaves everything as it is.
    async fn open_again(&self, config: &Config) -> Result<OpenedGuests, ServeError> {
        Ok(OpenedGuests {
            #[cfg(feature = "tls")]
            tls: config.tls.as_ref().map(crate::tls::Acceptor::open).transpose()?,
            table: RoutingTable::open(config, &self.guest_budget, &self.metrics).await?,
            // The last, since their states are written to the store.
            templates: match (&self.sandboxes, &config.sandboxes) {
                (Some(routes), Some(new)) => Some(routes.sandboxes.reopen_templates(new).await?),
                _ => None,
            },
        })
    }

    pub(crate) fn table(&self) -> Arc<RoutingTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Answers a request.
    pub(crate) async fn answer<B>(
        &self,
        audience: Audience,
        mut request: Request<B>,
        peer: IpAddr,
    ) -> Response
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: std::fmt::Debug + std::fmt::Display + Send + Sync + 'static,
    {
        let id = self.ids.of(&request);
        // Guests and other hosts speak of it by the same number.
        request.headers_mut().insert(REQUEST_ID, id.clone());
        let client = client_address(request.headers(), peer, self.is_forwarded);
        match HeaderValue::try_from(client.to_string()) {
            Ok(client) => drop(request.headers_mut().insert(CLIENT, client)),
            Err(_) => drop(request.headers_mut().remove(CLIENT)),
        }
        let span = match self.is_operation(audience, &request) {
            true => span::operation(&request),
            false => span::request(&mut request),
        };
        let mut response = async {
            let response = match self.check_address(audience, &request, client) {
                Ok(()) => self.find_and_answer(audience, request).await,
                Err(refusal) => refusal.into_response(),
            };
            span::answered(&response);
            response
        }
        .instrument(span)
        .await;
        // The rest of a body that was refused is not read, so the connection serves no further
        // request.
        let ends = response.status() == StatusCode::PAYLOAD_TOO_LARGE
            || *self.phase.borrow() != Phase::Running;
        let headers = response.headers_mut();
        headers.insert(REQUEST_ID, id);
        if ends {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// Whether a request is for the server itself. Programs in sandboxes have paths of these names,
    /// so one that names a sandbox is for that.
    fn is_operation<B>(&self, audience: Audience, request: &Request<B>) -> bool {
        let names_sandbox = || self.sandboxes.is_some() && Routes::names_sandbox(request);
        OPERATIONS.contains(&request.uri().path())
            && match audience {
                Audience::Operations => true,
                Audience::Requests { operations } => operations && !names_sandbox(),
            }
    }

    /// Refuses a request of an address that makes too many. Operations are exempt, since probes
    /// make them.
    fn check_address<B>(
        &self,
        audience: Audience,
        request: &Request<B>,
        client: IpAddr,
    ) -> Result<(), ErrorResponse> {
        if audience == Audience::Operations || self.is_operation(audience, request) {
            return Ok(());
        }
        self.addresses.request(client).inspect_err(|_| {
            self.metrics.refused_addresses.inc();
        })
    }

    async fn find_and_answer<B>(&self, audience: Audience, mut request: Request<B>) -> Response
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: std::fmt::Debug + std::fmt::Display + Send + Sync + 'static,
    {
        if self.is_operation(audience, &request)
            && let Some(response) = self.operate(audience, &request).await
        {
            return response;
        }
        if audience == Audience::Operations {
            return ErrorResponse::no_route().into_response();
        }
        if let Some(sandboxes) =
            self.sandboxes.as_ref().filter(|routes| routes.is_sandbox_request(&request))
        {
            span::route(request.method(), || Routes::pattern(request.uri().path()));
            let limits = BodyLimits { bytes: sandboxes.most(), time: self.body_time };
            if request.body().size_hint().lower() > limits.bytes as u64 {
                return ErrorResponse::too_large(limits.bytes).into_response();
            }
            let (request, meter) = self.metered(request, limits);
            #[cfg(feature = "fleet")]
            let request = match &self.fleet {
                Some(fleet) => {
                    let about = Routes::about(&request);
                    match fleet.route_sandbox(&*sandboxes.sandboxes, about, request).await {
                        RouteDecision::Here(request) => request,
                        RouteDecision::Answered(response) => return response,
                    }
                }
                None => request,
            };
            return self.answer_metered(sandboxes, request, &meter).await;
        }
        // Guests get headers of the client alone.
        request.headers_mut().remove(CLIENT);
        let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
        let host = request.uri().host().or(host);
        let table = self.table();
        let site = table.find(host, request.uri().path());
        #[cfg(feature = "fleet")]
        if let Some(fleet) = &self.fleet {
            let limits = BodyLimits {
                bytes: site.map_or(fleet.config.max_body, |site| site.config.max_body),
                time: self.body_time,
            };
            // The guest counts a body that stays here, and the way to another host one that goes.
            request.extensions_mut().insert(self.guest_budget.clone());
            let request =
                request.map(|body| Body::new(LimitedBody::new(body, limits, BodyMetering::Not)));
            return match fleet.route_guest(site.map(|site| &site.config), request).await {
                RouteDecision::Answered(response) => response,
                RouteDecision::Here(request) => match site {
                    Some(site) => site.answer(request, &table.gate).await,
                    None => ErrorResponse::no_route().into_response(),
                },
            };
        }
        match site {
            Some(site) => site.answer(request, &table.gate).await,
            None => ErrorResponse::no_route().into_response(),
        }
    }

    #[cfg(feature = "fleet")]
    async fn find_here(&self, request: Request<Body>, take: bool) -> Option<Response> {
        let fleet = self.fleet.as_ref()?;
        if let Some(sandboxes) =
            self.sandboxes.as_ref().filter(|routes| routes.is_sandbox_request(&request))
        {
            span::route(request.method(), || Routes::pattern(request.uri().path()));
            if let RouteSubject::Sandbox { id, .. } = Routes::about(&request) {
                let all = &sandboxes.sandboxes;
                if !all.has(&id) {
                    if !take {
                        return None;
                    }
                    match fleet.take_here(&**all, &id).await {
                        Ok(None) => {}
                        Ok(Some(_)) => return None,
                        Err(refusal) => return Some(refusal.into_response()),
                    }
                }
                if let Err(refusal) = all.check(&id) {
                    return Some(refusal.into_response());
                }
            }
            let limits = BodyLimits { bytes: sandboxes.most(), time: self.body_time };
            let (request, meter) = self.metered(request, limits);
            return Some(self.answer_metered(sandboxes, request, &meter).await);
        }
        let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
        let host = request.uri().host().or(host);
        let table = self.table();
        let site = table.find(host, request.uri().path())?;
        Some(site.answer(request, &table.gate).await)
    }

    /// A request about sandboxes whose body is counted while it arrives. Most handlers read bodies
    /// whole, and need more memory than the body to decode them.
    fn metered<B>(&self, request: Request<B>, limits: BodyLimits) -> (Request<Body>, Meter)
    where
        B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
        B::Error: std::fmt::Debug + std::fmt::Display + Send + Sync + 'static,
    {
        let meter = Meter::new(&self.body_shares, Routes::weight(&request));
        let counting = match Routes::is_passed_on(&request) {
            true => BodyMetering::Pieces(meter.clone()),
            false => BodyMetering::Whole(meter.clone()),
        };
        let mut request = request.map(|body| Body::new(LimitedBody::new(body, limits, counting)));
        // Decompressed bytes count with the body.
        request.extensions_mut().insert(meter.clone());
        (request, meter)
    }

    async fn answer_metered(
        &self,
        sandboxes: &Routes,
        request: Request<Body>,
        meter: &Meter,
    ) -> Response {
        meter.keep();
        let method = request.method().clone();
        let response = sandboxes.answer(request).await;
        if meter.is_exceeded() {
            return ErrorResponse::no_memory().into_response();
        }
        hold(response, &method, meter).await
    }

    /// Ends the server once it has answered every request that reached it.
    pub(crate) fn shutdown(&self) {
        let begins = self.phase.send_if_modified(|phase| {
            let running = *phase == Phase::Running;
            if running {
                *phase = Phase::Draining;
            }
            running
        });
        if let Some(audit) = self.audit.as_ref().filter(|_| begins) {
            audit.record_server("shutdown", true);
        }
        #[cfg(feature = "fleet")]
        if let Some(fleet) = &self.fleet {
            fleet.begin_to_end();
        }
    }

    /// Requests to the server itself.
    async fn operate<B>(&self, audience: Audience, request: &Request<B>) -> Option<Response> {
        let (method, uri) = (request.method(), request.uri());
        if !OPERATIONS.contains(&uri.path()) || method != Method::GET && method != Method::HEAD {
            return None;
        }
        let shows_key = self.sandboxes.as_ref().map(|routes| {
            let identity = routes.sandboxes.config.keys.identity(request.headers())?;
            identity.allow(&[Scope::Metrics, Scope::Admin])
        });
        let needs_key = self
            .sandboxes
            .as_ref()
            .is_some_and(|routes| routes.sandboxes.config.requires_metrics_key);
        if needs_key
            && !["/healthz", "/readyz"].contains(&uri.path())
            && let Some(Err(error)) = shows_key
        {
            return Some(ErrorResponse::from(error).into_response());
        }
        let viewer = match audience {
            Audience::Operations => Viewer::Operator,
            Audience::Requests { .. } => Viewer::Anyone,
        };
        let shows_tenants = viewer == Viewer::Operator || matches!(shows_key, Some(Ok(_)));
        match uri.path() {
            "/healthz" => Some("alive\n".into_response()),
            "/readyz" => Some(health::ready(self)),
            "/status" => Some(crate::status::page()),
            "/status.json" => Some(axum::Json(crate::status::data(self, viewer)).into_response()),
            "/status/pages.json" => Some(crate::status::pages(self, uri.query(), viewer).await),
            "/metrics" => {
                let mut response = Response::new(Body::from(self.read_metrics(shows_tenants)));
                let text = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(text));
                Some(response)
            }
            _ => None,
        }
    }

    /// All metrics. Those of tenants have their names, which not every client may see.
    fn read_metrics(&self, shows_tenants: bool) -> String {
        let table = self.table();
        for site in &table.sites {
            let counts = table.gate.count(site.line);
            self.metrics.set(&site.config.name, counts);
            site.pool.show(site.guest.pool_stats());
        }
        if let Some(routes) = &self.sandboxes {
            let (live, saved) = routes.sandboxes.count();
            self.metrics.set_sandboxes(live, saved);
        }
        for (check, fails) in health::checks(self) {
            self.metrics.set_healthy(check, !fails);
        }
        self.metrics.buffered.set(i64::try_from(self.budget.used()).unwrap_or(i64::MAX));
        let tenants = self.sandboxes.as_ref().filter(|_| shows_tenants);
        let tenants = tenants.map(|routes| routes.sandboxes.tenant_metrics());
        self.metrics.text(tenants.as_deref().unwrap_or_default())
    }
}

#[cfg(feature = "fleet")]
#[async_trait::async_trait]
impl FleetHost for ServerState {
    fn busy(&self) -> (usize, usize) {
        self.table().gate.busy()
    }

    fn routes(&self) -> Vec<String> {
        self.table().sites.iter().map(|site| route_of(&site.config)).collect()
    }

    fn sandboxes(&self) -> Option<Arc<dyn SandboxHost>> {
        let routes = self.sandboxes.as_ref()?;
        Some(routes.sandboxes.clone())
    }

    async fn answer_other(&self, mut request: Request<Body>, take: bool) -> Option<Response> {
        let span = span::request(&mut request);
        async {
            let response = self.find_here(request, take).await;
            if let Some(response) = &response {
                span::answered(response);
            }
            response
        }
        .instrument(span)
        .await
    }

    fn shutdown(&self) {
        Self::shutdown(self);
    }
}
