//! Proxy: routes a request to a service and returns its response.
//!
//! One future handles a request from start to end. It is independent of client sockets: the HTTP server (the server's
//! API, or a gateway's listeners) passes requests in and receives responses.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use hyper::{
    Request, Response, StatusCode,
    header::{self, HeaderValue},
    http::{request::Parts, uri::PathAndQuery},
    upgrade::OnUpgrade,
};

use crate::{
    access::{AccessLog, AccessRecord},
    auth::{self, AccessGrant, Gatekeeper, Verdict},
    body::RequestBody,
    connect::Connector,
    cors,
    error_response::ErrorResponse,
    headers::{self, ClientConnection, HeadRefusal, ParsedHead},
    response_body::{AccessEntry, RequestMetrics, ResponseBody},
    route_table::{Routes, ServiceState},
    scale_from_zero::ServiceWaker,
    tls::Certificates,
    upstream::content_length,
};

/// Limits that apply to all services.
#[derive(Clone, Copy, Debug)]
pub struct ProxyLimits {
    /// Timeout for opening a connection to a replica.
    pub connect_timeout: Duration,
    /// Maximum time without data in the middle of a request body.
    pub body_stall_timeout: Duration,
    /// Maximum number of requests of one service that wait for a first replica.
    pub held_max: u64,
    /// Maximum number of replicas that one request is tried on.
    pub attempts_max: u32,
}

impl ProxyLimits {
    pub const USUAL: Self = Self {
        connect_timeout: Duration::from_secs(5),
        body_stall_timeout: Duration::from_secs(60),
        held_max: 1000,
        attempts_max: 3,
    };
}

pub struct Proxy {
    pub routes: Arc<Routes>,
    pub connector: Arc<dyn Connector>,
    pub gatekeeper: Arc<dyn Gatekeeper>,
    pub waker: Arc<dyn ServiceWaker>,
    pub log: Option<Arc<dyn AccessLog>>,
    /// Names with a certificate. Only plain requests to these are redirected to HTTPS; without this field, all are.
    pub certificates: Option<Arc<Certificates>>,
    pub limits: ProxyLimits,
}

/// Validated request that is being forwarded. It is boxed, because every future that passes it on would otherwise
/// contain and copy it.
pub(crate) struct ProxyRequest<'a> {
    pub(crate) client: &'a ClientConnection,
    pub(crate) parts: Parts,
    pub(crate) head: ParsedHead,
    /// Prefix that is removed from the path before the replica receives it.
    pub(crate) stripped_prefix: &'a str,
    /// True if the token was checked before.
    pub(crate) is_authenticated: bool,
    /// True if the `Authorization` header was meant for windlass.
    pub(crate) strip_authorization: bool,
    pub(crate) identity: Option<HeaderValue>,
    pub(crate) on_upgrade: Option<OnUpgrade>,
    /// Rights that the response depends on; absent if no token is required.
    pub(crate) grant: Option<AccessGrant>,
}

impl ProxyRequest<'_> {
    /// Returns the path and query that the replica receives.
    pub(crate) fn path(&self) -> &str {
        let path = self.parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        path.get(self.stripped_prefix.len()..).unwrap_or("/")
    }
}

impl Proxy {
    /// Serves a request for the service of its host.
    pub async fn serve_by_host<B: Into<RequestBody>>(
        &self,
        origin: &ClientConnection,
        request: Request<B>,
    ) -> Response<ResponseBody> {
        let (proxy_request, body) = match parse_request(origin, request) {
            Ok(admitted) => admitted,
            Err(refusal) => return refusal_response(refusal),
        };
        let Some(live) = self.routes.host(headers::host_name(&proxy_request.head.host)) else {
            return ErrorResponse::new(StatusCode::NOT_FOUND, "no service has this host name")
                .into_response();
        };
        if live.service.https
            && !origin.https
            && self.has_certificate(headers::host_name(&proxy_request.head.host))
        {
            return redirect_to_https(headers::host_name(&proxy_request.head.host), proxy_request.path());
        }
        self.serve(live, proxy_request, body).await
    }

    pub(crate) fn has_certificate(&self, host: &str) -> bool {
        self.certificates.as_ref().is_none_or(|known| known.has(host))
    }

    /// Serves a request for `BASE/PROJECT/RUN/…`, such as `/proxy/services/main/llm/v1/models`.
    pub async fn serve_by_path<B: Into<RequestBody>>(
        &self,
        origin: &ClientConnection,
        base: &str,
        request: Request<B>,
    ) -> Response<ResponseBody> {
        let (mut proxy_request, body) = match parse_request(origin, request) {
            Ok(admitted) => admitted,
            Err(refusal) => return refusal_response(refusal),
        };
        let path = proxy_request.parts.uri.path().to_owned();
        let Some((key, rest)) = split_service_path(&path, base) else {
            return ErrorResponse::new(StatusCode::NOT_FOUND, "the path does not name a service")
                .into_response();
        };
        let mount = path.get(..path.len() - rest.len()).unwrap_or_default();
        if rest.is_empty() {
            // Otherwise relative links of the page would point outside the service.
            return redirect(&format!("{mount}/{}", query_suffix(&proxy_request.parts)));
        }
        let Some(live) = self.routes.service(key) else {
            // A caller without access to the project gets the same response as for an existing service.
            let project = key.split('/').next().unwrap_or_default();
            return match self.check_token(project, &mut proxy_request).await {
                Ok(()) => {
                    ErrorResponse::new(StatusCode::NOT_FOUND, "the service does not exist").into_response()
                }
                Err(say) => say.into_response(),
            };
        };
        if live.service.strip_prefix {
            proxy_request.stripped_prefix = mount;
        }
        self.serve(live, proxy_request, body).await
    }

    /// Serves a request for a known service, by a caller whose token was checked already.
    pub(crate) async fn serve_authenticated<B: Into<RequestBody>>(
        &self,
        live: Arc<ServiceState>,
        origin: &ClientConnection,
        (identity, rights): (Option<HeaderValue>, AccessGrant),
        request: Request<B>,
    ) -> Response<ResponseBody> {
        match parse_request(origin, request) {
            Ok((mut proxy_request, body)) => {
                proxy_request.grant = Some(rights);
                proxy_request.is_authenticated = true;
                proxy_request.strip_authorization = true;
                proxy_request.identity = identity;
                self.serve(live, proxy_request, body).await
            }
            Err(refusal) => refusal_response(refusal),
        }
    }

    async fn serve(
        &self,
        live: Arc<ServiceState>,
        mut request: Box<ProxyRequest<'_>>,
        mut body: RequestBody,
    ) -> Response<ResponseBody> {
        let mut metrics = RequestMetrics::start(&live);
        if let Some(log) = &self.log {
            metrics.access = Some(Box::new(access_entry(log, &live, &request, metrics.began())));
        }
        let caller =
            live.service.cors.as_ref().and_then(|_| request.parts.headers.get(header::ORIGIN).cloned());
        let answered = match self.check_admission(&live, &mut request, &mut body, &metrics).await {
            Ok(None) => {
                live.stats().admit();
                self.forward(&live, request, body, metrics).await
            }
            Ok(Some(response)) => Err((response, metrics)),
            Err(say) => Err((say.into_response(), metrics)),
        };
        let mut response = match answered {
            Ok(response) => response,
            Err((response, mut metrics)) => {
                metrics.status = response.status();
                response
            }
        };
        if let Some(rules) = &live.service.cors {
            cors::set_headers(rules, caller.as_ref(), response.headers_mut());
        }
        response
    }

    /// Runs the checks that precede forwarding. May return a response.
    async fn check_admission(
        &self,
        live: &ServiceState,
        request: &mut ProxyRequest<'_>,
        body: &mut RequestBody,
        metrics: &RequestMetrics,
    ) -> Result<Option<Response<ResponseBody>>, ErrorResponse> {
        let service = &live.service;
        if let Some(rules) = &service.cors
            && let Some(response) = cors::preflight(rules, &request.parts)
        {
            return Ok(Some(response));
        }
        let path = request.path().split('?').next().unwrap_or("/");
        let peer = request.client.peer.ip();
        if let Err(wait) = live.limits.acquire(path, &request.parts.headers, peer, metrics.began()) {
            let text = "too many requests: rate limit of the service exceeded";
            return Err(ErrorResponse::with_retry_after(StatusCode::TOO_MANY_REQUESTS, text, wait));
        }
        if service.auth && !request.is_authenticated {
            self.check_token(&service.project, request).await?;
        } else if !request.is_authenticated {
            request.strip_authorization = self.carries_windlass_token(live, request).await;
        }
        let length = content_length(&request.parts.headers).ok().flatten().or_else(|| body.length());
        if let (Some(max), Some(length)) = (service.body_max, length)
            && length > max
        {
            let text = format!("the request body has {length} bytes; the service accepts at most {max}");
            return Err(ErrorResponse::new(StatusCode::PAYLOAD_TOO_LARGE, text));
        }
        body.set_limits(service.body_max, self.limits.body_stall_timeout);
        Ok(None)
    }

    /// Returns whether the `Authorization` header of a request to a service without authentication contains a token of
    /// the server.
    async fn carries_windlass_token(&self, live: &ServiceState, request: &ProxyRequest<'_>) -> bool {
        for token in auth::unrecognized_tokens(&request.parts.headers) {
            let Some(token) = token else { continue };
            let known =
                self.gatekeeper.is_known(token, &live.service.project, request.client.peer.ip()).await;
            // If unknown, assume that it does.
            if known != Some(false) {
                return true;
            }
        }
        false
    }

    async fn check_token(&self, project: &str, request: &mut ProxyRequest<'_>) -> Result<(), ErrorResponse> {
        let Some((token, field)) = auth::find_token(&request.parts.headers) else {
            let text =
                "this service requires the token of a project member: send `Authorization: Bearer TOKEN`";
            return Err(ErrorResponse::new(StatusCode::UNAUTHORIZED, text));
        };
        match self.gatekeeper.check(token, project, request.client.peer.ip()).await {
            Verdict::Allow { identity } => {
                let rights = AccessGrant::new(&self.gatekeeper, token, project);
                request.grant = Some(rights);
                request.strip_authorization = field;
                request.identity = identity;
                Ok(())
            }
            Verdict::Deny => {
                let text = "the token does not belong to a member of this project";
                Err(ErrorResponse::new(StatusCode::FORBIDDEN, text))
            }
            Verdict::Unknown => {
                let text = "the token cannot be checked now: the server does not respond";
                Err(ErrorResponse::with_retry_after(
                    StatusCode::SERVICE_UNAVAILABLE,
                    text,
                    Duration::from_secs(5),
                ))
            }
        }
    }
}

fn parse_request<'a, B: Into<RequestBody>>(
    origin: &'a ClientConnection,
    mut request: Request<B>,
) -> Result<(Box<ProxyRequest<'a>>, RequestBody), HeadRefusal> {
    let token_request =
        request.headers().contains_key(header::UPGRADE).then(|| hyper::upgrade::on(&mut request));
    let (parts, body) = request.into_parts();
    let requested = headers::parse_head(&parts)?;
    let on_upgrade = token_request.filter(|_| requested.upgrade.is_some());
    let proxy_request = ProxyRequest {
        client: origin,
        parts,
        head: requested,
        stripped_prefix: "",
        is_authenticated: false,
        strip_authorization: false,
        identity: None,
        on_upgrade,
        grant: None,
    };
    Ok((Box::new(proxy_request), body.into()))
}

fn refusal_response(HeadRefusal(status, text): HeadRefusal) -> Response<ResponseBody> {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_REQUEST);
    let mut response = ErrorResponse::new(status, text).into_response();
    // The connection is closed, because its framing cannot be trusted.
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Splits off `PROJECT/RUN`.
fn split_service_path<'a>(path: &'a str, base: &str) -> Option<(&'a str, &'a str)> {
    let path = path.strip_prefix(base)?.strip_prefix('/')?;
    let (project, rest) = path.split_once('/')?;
    let run = rest.split('/').next().unwrap_or_default();
    if project.is_empty() || run.is_empty() {
        return None;
    }
    path.split_at_checked(project.len() + 1 + run.len())
}

fn query_suffix(parts: &Parts) -> String {
    parts.uri.query().map(|query| format!("?{query}")).unwrap_or_default()
}

fn redirect(to: &str) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::text(Bytes::new()));
    *response.status_mut() = StatusCode::PERMANENT_REDIRECT;
    if let Ok(to) = HeaderValue::from_str(to) {
        response.headers_mut().insert(header::LOCATION, to);
    }
    response
}

pub(crate) fn redirect_to_https(host: &str, path: &str) -> Response<ResponseBody> {
    redirect(&format!("https://{host}{path}"))
}

fn access_entry(
    log: &Arc<dyn AccessLog>,
    live: &ServiceState,
    request: &ProxyRequest<'_>,
    began: std::time::Instant,
) -> AccessEntry {
    let record = AccessRecord {
        service: Arc::clone(&live.key),
        replica: None,
        peer: request.client.peer.ip(),
        method: request.parts.method.clone(),
        uri: request.parts.uri.clone(),
        version: request.parts.version,
        status: StatusCode::OK,
        began,
        took: Duration::ZERO,
        bytes_in: 0,
        bytes_out: 0,
        attempts: 0,
        is_truncated: false,
    };
    AccessEntry { log: Arc::clone(log), record }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_path_splits_into_project_run_and_remainder() {
        let base = "/proxy/services";
        assert_eq!(split_service_path("/proxy/services/p/r/x/y", base), Some(("p/r", "/x/y")));
        assert_eq!(split_service_path("/proxy/services/p/r/", base), Some(("p/r", "/")));
        assert_eq!(split_service_path("/proxy/services/p/r", base), Some(("p/r", "")));
        for path in [
            "/proxy/services/p",
            "/proxy/services/p/",
            "/proxy/services//r",
            "/other/p/r",
            "/proxy/servicesX/p/r",
        ] {
            assert_eq!(split_service_path(path, base), None, "{path}");
        }
    }
}
