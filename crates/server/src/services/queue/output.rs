//! Output of containers: stored byte for byte, in consecutive chunks without gaps.

use windlass_model::queue::QueueCaller;

use super::{Error, Requester, Result, transaction::job_submission};
use crate::{
    app::App,
    db::{Db, DbError, Unit, containers, jobs},
};

/// Maximum size of one stream of one attempt. Bytes beyond it are dropped: the response contains the stored length.
pub const STREAM_BYTES_MAX: i64 = windlass_api::queue_client::STREAM_BYTES_MAX.cast_signed();
pub const STREAMS: [&str; 3] = ["stdout", "stderr", "system"];

fn check_stream(stream: &str) -> Result<()> {
    if STREAMS.contains(&stream) { Ok(()) } else { Err(Error::invalid(format!("unknown stream `{stream}`"))) }
}

/// Appends output that the executor read. A chunk that was sent before changes nothing. Returns the stored length of
/// the stream.
pub async fn append(
    app: &App,
    asker: &Requester,
    uuid: &str,
    stream: &str,
    at: i64,
    bytes: Vec<u8>,
) -> Result<i64> {
    check_stream(stream)?;
    let QueueCaller::Executor { container, attempt } = &asker.who else {
        return Err(Error::denied("only the container's executor may write its output"));
    };
    if container != uuid {
        return Err(Error::Missing(uuid.to_owned()));
    }
    let attempt = i64::try_from(*attempt).unwrap_or(i64::MAX);
    let end = containers::output_end(app.db(), uuid, attempt, stream).await?;
    if at > end {
        return Err(Error::invalid(format!("the stream ends at {end}")));
    }
    let length = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
    if at + length <= end || end >= STREAM_BYTES_MAX {
        return Ok(end);
    }
    let skip = usize::try_from(end - at).unwrap_or(0);
    let new = bytes.get(skip..).unwrap_or_default().to_vec();
    let mut unit = Unit::new().and([containers::append_output(uuid, attempt, stream, end, new)]);
    let found = containers::containers(app.db(), &[uuid.to_owned()]).await?;
    if let Some(job) = found.first().and_then(|kept| job_submission(&kept.doc)) {
        unit = unit.and([jobs::mark_due_soon(job)]);
    }
    app.db().write(unit).await?;
    Ok(at + length)
}

/// A page of a stream of the last attempt that wrote output.
pub async fn read(app: &App, asker: &Requester, uuid: &str, stream: &str, from: i64) -> Result<Vec<u8>> {
    check_stream(stream)?;
    super::records::container(app, asker, uuid).await?;
    Ok(page(app.db(), uuid, stream, from).await?)
}

/// As [`read`], without a check of the caller's rights.
pub async fn page(db: &Db, uuid: &str, stream: &str, from: i64) -> Result<Vec<u8>, DbError> {
    let Some(attempt) = containers::output_attempt(db, uuid).await? else { return Ok(Vec::new()) };
    let mut bytes = Vec::new();
    for (at, piece) in containers::output(db, uuid, attempt, stream, from).await? {
        let skip = usize::try_from(from - at).unwrap_or(0);
        bytes.extend_from_slice(piece.get(skip.min(piece.len())..).unwrap_or_default());
    }
    Ok(bytes)
}

/// Stored length of a stream of the last attempt that wrote output.
pub async fn end(db: &Db, uuid: &str, stream: &str) -> Result<u64, DbError> {
    let Some(attempt) = containers::output_attempt(db, uuid).await? else { return Ok(0) };
    let end = containers::output_end(db, uuid, attempt, stream).await?;
    Ok(u64::try_from(end).unwrap_or_default())
}
