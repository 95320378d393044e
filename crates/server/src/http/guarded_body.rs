//! Long responses that are broken off when the caller loses the rights to them.

use std::{future::Future, io};

use axum::body::{Body, BodyDataStream, Bytes};
use futures_util::{StreamExt as _, stream::unfold};

use super::port_stream::StreamSlot;
use crate::{
    error::{Error, Result},
    stream_rights::StreamRegistration,
};

/// A body with the rights that it needs.
pub(super) struct GuardedBody<A> {
    data: BodyDataStream,
    allowed: A,
    rights: StreamRegistration,
    _slot: StreamSlot,
}

impl<A, R> GuardedBody<A>
where
    A: Fn() -> R + Send + 'static,
    R: Future<Output = Result<()>> + Send,
{
    pub(super) fn new(body: Body, slot: StreamSlot, rights: StreamRegistration, allowed: A) -> Self {
        Self { data: body.into_data_stream(), allowed, rights, _slot: slot }
    }

    pub(super) fn into_body(self) -> Body {
        Body::from_stream(unfold(Some(self), |body| async move {
            let mut body = body?;
            let piece = body.next().await?;
            // After an error, the connection is closed: the client sees that the response is not complete.
            let rest = piece.is_ok().then_some(body);
            Some((piece, rest))
        }))
    }

    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            tokio::select! {
                // Bytes are not sent after the loss of the rights, even if they are available.
                biased;
                () = self.rights.changed() => match (self.allowed)().await {
                    Ok(()) => {}
                    // A database that does not answer revokes no rights.
                    Err(Error::Db(_)) => self.rights.again(),
                    Err(error) => {
                        return Some(Err(io::Error::new(io::ErrorKind::PermissionDenied, error.to_string())));
                    }
                },
                piece = self.data.next() => return piece.map(|piece| piece.map_err(io::Error::other)),
            }
        }
    }
}
