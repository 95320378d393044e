//! Tunnel after an upgrade (such as a WebSocket): copies bytes in both directions until one side ends or the caller's
//! rights are revoked.

use std::{future::poll_fn, task::Poll};

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt as _;

use crate::{
    auth::AccessGrant, replica::OutstandingRequest, response_body::RequestMetrics,
    upstream::UpstreamConnection,
};

/// Size of the copy buffer of each direction.
const COPY_BUFFER_BYTES: usize = 16 * 1024;

pub(crate) fn spawn_splice(
    caller: OnUpgrade,
    conn: Box<UpstreamConnection>,
    outstanding: OutstandingRequest,
    metrics: RequestMetrics,
    mut rights: Option<AccessGrant>,
) {
    tokio::spawn(async move {
        // Metrics and the replica's request count are closed with the tunnel, not with the head of the response.
        let (_outstanding, mut metrics) = (outstanding, metrics);
        let Ok(caller) = caller.await else {
            metrics.is_truncated = true;
            return;
        };
        let mut caller = TokioIo::new(caller);
        let (mut replica, first) = conn.into_stream();
        metrics.bytes_out = first.len() as u64;
        if caller.write_all(&first).await.is_err() {
            metrics.is_truncated = true;
            return;
        }
        drop(first);
        let lost = poll_fn(|cx| {
            let is_lost = rights.as_mut().is_some_and(|rights| rights.is_revoked(cx));
            if is_lost { Poll::Ready(()) } else { Poll::Pending }
        });
        tokio::select! {
            biased;
            () = lost => metrics.is_truncated = true,
            copied = tokio::io::copy_bidirectional_with_sizes(&mut caller, &mut replica, COPY_BUFFER_BYTES, COPY_BUFFER_BYTES) => {
                match copied {
                    Ok((up, down)) => {
                        metrics.bytes_in = up;
                        metrics.bytes_out += down;
                    }
                    Err(_) => metrics.is_truncated = true,
                }
            }
        }
    });
}
