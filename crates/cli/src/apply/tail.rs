//! The log of one submission, from where it was left.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use uuid::Uuid;
use windlass_api::{logs::PollRequest, operations::PollLogs};
use windlass_model::time::Timestamp;

use crate::{context::Context, problem::Problem};

/// The most a page may hold.
const PIECES_MAX: i64 = 1000;

#[derive(Debug)]
pub(crate) struct Tail {
    request: PollRequest,
    /// Bytes read so far, when reading began at the first.
    read: Option<u64>,
}

impl Tail {
    pub(crate) fn new(run: &str, submission: Uuid, since: Option<Timestamp>, diagnose: bool) -> Self {
        let request = PollRequest {
            run_name: run.to_owned(),
            job_submission_id: submission,
            start_time: since,
            end_time: None,
            descending: false,
            next_token: None,
            limit: PIECES_MAX,
            diagnose,
        };
        Self { request, read: since.is_none().then_some(0) }
    }

    pub(crate) fn submission(&self) -> Uuid {
        self.request.job_submission_id
    }

    /// What there is beyond what was read; empty when that is nothing.
    pub(crate) async fn next(&mut self, cx: &Context) -> Result<Vec<u8>, Problem> {
        let page = cx.call::<PollLogs>(&self.request).await?;
        let mut bytes = Vec::new();
        for event in &page.logs {
            let piece = STANDARD
                .decode(&event.message)
                .map_err(|error| Problem::caused("read the server's log page", &error))?;
            bytes.extend_from_slice(&piece);
        }
        // A token is the offset of the byte to go on with; without one we know it when we counted.
        self.read = self.read.map(|read| read + bytes.len() as u64);
        match (page.next_token, self.read, page.logs.last()) {
            (Some(token), _, _) => self.request.next_token = Some(token),
            (None, Some(read), _) => self.request.next_token = (read > 0).then(|| read.to_string()),
            (None, None, Some(last)) => {
                (self.request.next_token, self.request.start_time) = (None, Some(last.timestamp));
            }
            (None, None, None) => {}
        }
        Ok(bytes)
    }
}
