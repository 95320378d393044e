//! Handlers whose responses are bytes or streams.

use std::future::Future;

use axum::{
    body::{Body, HttpBody as _},
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use futures_util::future::BoxFuture;
use windlass_api::{Access, Body as Kind, Operation};

use super::{
    ApiRoutes, ResponseHeaders, authenticate,
    credentials::Credentials,
    guarded_body::GuardedBody,
    port_stream::{self, StreamSlot},
    reauthorize, resolve_scope, rights_basis, sse, terminal, with_body, with_headers,
};
use crate::{
    agents::PortStream,
    app::App,
    auth::{Caller, ProjectScope},
    error::Result,
    services::{SseStream, runs::OpenedShell},
    stream_rights::{RightsBasis, StreamRegistration, StreamRights},
};

/// Determines whether the caller of an open stream still has its rights.
type RightsCheck = Box<dyn Fn() -> BoxFuture<'static, Result<()>> + Send + Sync>;

impl ApiRoutes {
    /// As `project`, with bytes as the response. The handler also returns headers. A response that is still being sent
    /// when the caller loses the rights is broken off.
    #[must_use]
    pub(crate) fn project_bytes<O, F, R>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, ProjectScope, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<(Body, ResponseHeaders)>> + Send,
    {
        const { assert!(O::ACCESS.in_project() && matches!(O::BODY, Kind::Bytes)) }
        self.mount_raw::<O, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let credentials = Credentials::of::<O>(&app, &arrived)?;
                let path = arrived.path.clone();
                let caller = authenticate::<O>(&app, &arrived).await?;
                let scope = resolve_scope::<O>(&app, caller, &path).await?;
                let (basis, user) = (rights_basis(&scope), scope.caller.user.id);
                let request = arrived.read::<O>(&app).await?;
                let (body, headers) = handler(app.clone(), scope, request).await?;
                // A body in memory is sent at once.
                let body = match body.size_hint().exact() {
                    Some(_) => body,
                    None => {
                        let rights = StreamRights::register(&app, basis);
                        let slot = StreamSlot::for_response(&app, user)?;
                        let allowed = move || {
                            let (app, credentials, path) = (app.clone(), credentials.clone(), path.clone());
                            async move { reauthorize::<O>(&app, &credentials, &path).await.map(drop) }
                        };
                        GuardedBody::new(body, slot, rights, allowed).into_body()
                    }
                };
                let mut response = with_body(StatusCode::OK, "application/octet-stream", body);
                let nosniff = HeaderValue::from_static("nosniff");
                response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, nosniff);
                response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
                Ok(with_headers(response, headers))
            }
        })
    }

    /// As `project`, with a stream of events as the response. The handler receives the id of the last event that a
    /// reconnecting client had received.
    #[must_use]
    pub fn project_events<O, F, R>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, ProjectScope, O::Request, Option<u64>) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<SseStream<O::Response>>> + Send,
    {
        const { assert!(O::ACCESS.in_project() && matches!(O::BODY, Kind::Events)) }
        self.mount_raw::<O, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let credentials = Credentials::of::<O>(&app, &arrived)?;
                let (last, path) = (arrived.last_event_id()?, arrived.path.clone());
                let caller = authenticate::<O>(&app, &arrived).await?;
                let within = resolve_scope::<O>(&app, caller, &path).await?;
                let rights = StreamRights::register(&app, rights_basis(&within));
                let place = StreamSlot::for_response(&app, within.caller.user.id)?;
                let request = arrived.read::<O>(&app).await?;
                let beats = handler(app.clone(), within, request, last).await?;
                let watched = app.clone();
                let allowed = move || {
                    let (app, credentials, path) = (watched.clone(), credentials.clone(), path.clone());
                    async move { reauthorize::<O>(&app, &credentials, &path).await.map(drop) }
                };
                Ok(sse::respond(app, beats, place, rights, allowed))
            }
        })
    }

    /// As `token`, with a stream of events as the response.
    #[must_use]
    pub fn token_events<O, F, R>(self, handler: F) -> Self
    where
        O: Operation,
        F: Fn(App, Caller, O::Request, Option<u64>) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<SseStream<O::Response>>> + Send,
    {
        const { assert!(matches!(O::ACCESS, Access::Token) && matches!(O::BODY, Kind::Events)) }
        self.mount_raw::<O, _, _>(move |app, arrived| {
            let handler = handler.clone();
            async move {
                let credentials = Credentials::of::<O>(&app, &arrived)?;
                let last = arrived.last_event_id()?;
                let caller = authenticate::<O>(&app, &arrived).await?;
                let basis = RightsBasis {
                    user: caller.user.id,
                    token_hash: caller.token.hash(),
                    queue_token: None,
                    project: None,
                };
                let rights = StreamRights::register(&app, basis);
                let place = StreamSlot::for_response(&app, caller.user.id)?;
                let request = arrived.read::<O>(&app).await?;
                let beats = handler(app.clone(), caller, request, last).await?;
                let watched = app.clone();
                let allowed = move || {
                    let (app, credentials) = (watched.clone(), credentials.clone());
                    async move { credentials.authenticate(&app).await.map(drop) }
                };
                Ok(sse::respond(app, beats, place, rights, allowed))
            }
        })
    }

    /// As `project_stream`, with a WebSocket of a browser and a shell.
    #[must_use]
    pub(crate) fn project_terminal<O, F, R, C, S>(self, handler: F, check: C) -> Self
    where
        O: Operation<Request: Clone + Sync>,
        F: Fn(App, ProjectScope, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<OpenedShell>> + Send,
        C: Fn(App, ProjectScope, O::Request) -> S + Clone + Send + Sync + 'static,
        S: Future<Output = Result<()>> + Send + 'static,
    {
        self.project_upgrade::<O, _, _, _, _, _, _>(
            terminal::require_handshake,
            handler,
            check,
            terminal::respond::<RightsCheck, _>,
        )
    }

    /// As `project`, and the connection becomes a stream to what the handler opened. `check` determines, repeatedly
    /// while the stream is open, whether the caller still has the rights to the object and the project.
    #[must_use]
    pub fn project_stream<O, F, R, C, S>(self, handler: F, check: C) -> Self
    where
        O: Operation<Request: Clone + Sync>,
        F: Fn(App, ProjectScope, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<PortStream>> + Send,
        C: Fn(App, ProjectScope, O::Request) -> S + Clone + Send + Sync + 'static,
        S: Future<Output = Result<()>> + Send + 'static,
    {
        self.project_upgrade::<O, _, _, _, _, _, _>(
            port_stream::require_upgrade,
            handler,
            check,
            port_stream::respond::<RightsCheck, _>,
        )
    }

    /// A connection that is used for something else than HTTP after the response: `accept` takes it from the request,
    /// `handler` opens what it is connected to, and `respond` connects them.
    fn project_upgrade<O, U, T, F, R, C, S>(
        self,
        accept: fn(&mut Request) -> Result<U>,
        handler: F,
        check: C,
        respond: fn(App, U, T, StreamSlot, StreamRegistration, RightsCheck) -> Response,
    ) -> Self
    where
        O: Operation<Request: Clone + Sync>,
        U: Send + 'static,
        T: Send + 'static,
        F: Fn(App, ProjectScope, O::Request) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Result<T>> + Send,
        C: Fn(App, ProjectScope, O::Request) -> S + Clone + Send + Sync + 'static,
        S: Future<Output = Result<()>> + Send + 'static,
    {
        const { assert!(O::ACCESS.in_project() && matches!(O::BODY, Kind::Stream)) }
        self.mount_raw::<O, _, _>(move |app, mut arrived| {
            let (handler, check) = (handler.clone(), check.clone());
            async move {
                let credentials = Credentials::of::<O>(&app, &arrived)?;
                let path = arrived.path.clone();
                let caller = authenticate::<O>(&app, &arrived).await?;
                let within = resolve_scope::<O>(&app, caller, &path).await?;
                let rights = StreamRights::register(&app, rights_basis(&within));
                let connection = accept(&mut arrived.request)?;
                let request = arrived.read::<O>(&app).await?;
                let slot = StreamSlot::for_stream(&app, within.caller.user.id)?;
                let opened = handler(app.clone(), within, request.clone()).await?;
                let watched = app.clone();
                let allowed = move || -> BoxFuture<'static, Result<()>> {
                    let (app, credentials, path) = (watched.clone(), credentials.clone(), path.clone());
                    let (check, request) = (check.clone(), request.clone());
                    Box::pin(async move {
                        let scope = reauthorize::<O>(&app, &credentials, &path).await?;
                        check(app, scope, request).await
                    })
                };
                Ok(respond(app, connection, opened, slot, rights, Box::new(allowed)))
            }
        })
    }
}
