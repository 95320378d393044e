//! Token checks by the server.

use std::{net::IpAddr, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use windlass_api::{
    gateways::{TokenCheck, TokenCheckRequest},
    operations::CheckServiceToken,
};

use super::server::ServerClient;
use crate::auth::{Gatekeeper, Verdict};

/// Timeout of a token check; a caller waits for it.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which the token of a long-lived stream is checked again.
const REVOCATION_CHECK_INTERVAL: Duration = Duration::from_secs(3);

pub(super) struct ServerGatekeeper(pub(super) Arc<ServerClient>);

/// Queries the server about a token; `None` if it does not respond.
async fn check_token(server: &ServerClient, token: &str, project: &str) -> Option<TokenCheck> {
    let requested = TokenCheckRequest { token: token.to_owned(), project: project.to_owned() };
    match server.call::<CheckServiceToken>(&requested, CHECK_TIMEOUT).await {
        Ok(answer) => Some(answer),
        Err(error) => {
            tracing::debug!(%error, "failed to check token");
            None
        }
    }
}

impl Gatekeeper for ServerGatekeeper {
    fn check<'a>(&'a self, token: &'a str, project: &'a str, _peer: IpAddr) -> BoxFuture<'a, Verdict> {
        Box::pin(async move {
            match check_token(&self.0, token, project).await {
                Some(answer) if answer.allowed => Verdict::Allow { identity: None },
                Some(_) => Verdict::Deny,
                None => Verdict::Unknown,
            }
        })
    }

    fn is_known<'a>(
        &'a self,
        token: &'a str,
        project: &'a str,
        _peer: IpAddr,
    ) -> BoxFuture<'a, Option<bool>> {
        Box::pin(async move { check_token(&self.0, token, project).await.map(|answer| answer.known) })
    }

    fn wait_until_revoked(&self, token: &str, project: &str) -> BoxFuture<'static, ()> {
        let (server, token, project) = (Arc::clone(&self.0), token.to_owned(), project.to_owned());
        Box::pin(async move {
            loop {
                tokio::time::sleep(REVOCATION_CHECK_INTERVAL).await;
                // An unreachable server does not revoke access.
                if check_token(&server, &token, &project).await.is_some_and(|answer| !answer.allowed) {
                    return;
                }
            }
        })
    }
}
