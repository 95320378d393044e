//! Tokens of callers, as the server knows them.

use std::{net::IpAddr, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use windlass_api::{gateways::CheckRequest, operations::CheckServiceToken};

use super::server::Server;
use crate::auth::{Gatekeeper, Verdict};

/// A caller waits for this.
const CHECK_WITHIN: Duration = Duration::from_secs(5);

pub(super) struct Asking(pub(super) Arc<Server>);

impl Gatekeeper for Asking {
    fn check<'a>(&'a self, token: &'a str, project: &'a str, _peer: IpAddr) -> BoxFuture<'a, Verdict> {
        Box::pin(async move {
            let asked = CheckRequest { token: token.to_owned(), project: project.to_owned() };
            match self.0.call::<CheckServiceToken>(&asked, CHECK_WITHIN).await {
                Ok(answer) if answer.allowed => Verdict::Allow { identity: None },
                Ok(_) => Verdict::Deny,
                Err(error) => {
                    tracing::debug!(%error, "check a token");
                    Verdict::Unknown
                }
            }
        })
    }
}
