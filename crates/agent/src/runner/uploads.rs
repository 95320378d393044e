//! Uploads of a job, streamed from the connection to the disk one chunk at a time.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use axum::{
    body::{Body, Bytes},
    extract::{Multipart, State, multipart::MultipartError},
    http::StatusCode,
};
use futures_util::{Stream, StreamExt, TryStreamExt};
use tokio::io::AsyncWriteExt;
use uuid::Uuid;

use super::{
    job::Job,
    steps::{self, Call, CallVerdict},
};
use crate::http::ErrorResponse;

/// Maximum size of an upload in bytes.
const UPLOAD_BYTES_MAX: u64 = 16 << 30;
/// Maximum number of archives of one job.
const ARCHIVES_MAX: usize = 1024;
/// Name of the only form field, which holds an archive.
const ARCHIVE_FIELD: &str = "archive";

/// File that is being written; removed when dropped.
struct PartialUpload(PathBuf);

impl Drop for PartialUpload {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// `POST /api/upload_code`: the body is the file.
pub(super) async fn upload_code(State(job): State<Arc<Job>>, body: Body) -> Result<(), ErrorResponse> {
    check_allowed(&job, Call::UploadCode)?;
    let chunks = body.into_data_stream().map_err(|_| ErrorResponse::bad_request("the upload ended early"));
    let part = receive(&job, chunks).await?;
    finish_upload(&job, Call::UploadCode, &part, Job::code_name())
}

/// `POST /api/upload_archive`: one part whose file name is the archive's id.
pub(super) async fn upload_archive(
    State(job): State<Arc<Job>>,
    mut form: Multipart,
) -> Result<(), ErrorResponse> {
    check_allowed(&job, Call::UploadArchive)?;
    let Some(field) = form.next_field().await.map_err(|error| multipart_error(&error))? else {
        return Err(ErrorResponse::bad_request("the form is empty"));
    };
    if field.name() != Some(ARCHIVE_FIELD) {
        return Err(ErrorResponse::bad_request("unexpected part of the form: expected `archive`"));
    }
    // An id, and therefore never a path.
    let id: Uuid = field
        .file_name()
        .and_then(|name| name.parse().ok())
        .ok_or_else(|| ErrorResponse::bad_request("the file name of the part is not an archive id"))?;
    let part = receive(&job, field.map_err(|error| multipart_error(&error))).await?;
    if form.next_field().await.map_err(|error| multipart_error(&error))?.is_some() {
        return Err(ErrorResponse::bad_request("the form has more than one part"));
    }
    finish_upload(&job, Call::UploadArchive, &part, &id.to_string())
}

fn check_allowed(job: &Job, call: Call) -> Result<(), ErrorResponse> {
    match job.verdict(call) {
        CallVerdict::Take(_) | CallVerdict::Repeat => Ok(()),
        CallVerdict::Refuse => Err(ErrorResponse::conflict(steps::refusal_message(job.step()))),
    }
}

fn finish_upload(job: &Job, call: Call, part: &PartialUpload, name: &str) -> Result<(), ErrorResponse> {
    match job.store_upload(call, &part.0, name) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(storage_error(&error)),
        Err(at) => Err(ErrorResponse::conflict(steps::refusal_message(at))),
    }
}

async fn receive(
    job: &Job,
    chunks: impl Stream<Item = Result<Bytes, ErrorResponse>>,
) -> Result<PartialUpload, ErrorResponse> {
    let dir = job.uploads();
    prepare_dir(&dir).map_err(|error| storage_error(&error))?;
    let part = PartialUpload(dir.join(format!(".part-{}", Uuid::from_bytes(random_bytes()?))));
    let mut file = tokio::fs::File::create_new(&part.0).await.map_err(|error| storage_error(&error))?;
    let mut chunks = std::pin::pin!(chunks);
    let mut size = 0;
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        size += chunk.len() as u64;
        if size > UPLOAD_BYTES_MAX {
            let text = format!("the upload exceeds {UPLOAD_BYTES_MAX} bytes");
            return Err(ErrorResponse::new(StatusCode::PAYLOAD_TOO_LARGE, text));
        }
        file.write_all(&chunk).await.map_err(|error| storage_error(&error))?;
    }
    file.flush().await.map_err(|error| storage_error(&error))?;
    Ok(part)
}

/// Creates the directory, or returns an error if it holds too many files.
fn prepare_dir(dir: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    if std::fs::read_dir(dir)?.count() > ARCHIVES_MAX {
        return Err(std::io::ErrorKind::QuotaExceeded.into());
    }
    Ok(())
}

fn random_bytes() -> Result<[u8; 16], ErrorResponse> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|_| ErrorResponse::internal("failed to generate random bytes"))?;
    Ok(bytes)
}

fn multipart_error(error: &MultipartError) -> ErrorResponse {
    ErrorResponse::new(error.status(), error.body_text())
}

fn storage_error(error: &std::io::Error) -> ErrorResponse {
    tracing::warn!(%error, "failed to store upload");
    if matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded) {
        return ErrorResponse::new(StatusCode::INSUFFICIENT_STORAGE, "no space left for the upload");
    }
    ErrorResponse::internal("failed to store the upload")
}
