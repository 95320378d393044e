//! After a change of protocol (a WebSocket): bytes both ways, until one side ends.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWriteExt as _;

use crate::{replica::Outstanding, reply::Tally, upstream::Conn};

/// Copied at once in each direction.
const BUFFER: usize = 16 * 1024;

pub(crate) fn open(caller: OnUpgrade, conn: Box<Conn>, outstanding: Outstanding, tally: Tally) {
    tokio::spawn(async move {
        // The account and the replica's count are closed with the tunnel, not with the head of the answer.
        let (_outstanding, mut tally) = (outstanding, tally);
        let Ok(caller) = caller.await else {
            tally.cut = true;
            return;
        };
        let mut caller = TokioIo::new(caller);
        let (mut replica, first) = conn.into_stream();
        tally.bytes_out = first.len() as u64;
        if caller.write_all(&first).await.is_err() {
            tally.cut = true;
            return;
        }
        drop(first);
        match tokio::io::copy_bidirectional_with_sizes(&mut caller, &mut replica, BUFFER, BUFFER).await {
            Ok((up, down)) => {
                tally.bytes_in = up;
                tally.bytes_out += down;
            }
            Err(_) => tally.cut = true,
        }
    });
}
