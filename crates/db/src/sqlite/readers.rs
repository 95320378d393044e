//! Reader threads: each has a read-only connection; an idle one processes the next query.

use std::{
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::Instant,
};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{ReplySender, conn::Conn};
use crate::{
    clock::Clock,
    counters::Counters,
    error::DbError,
    ids::Ids,
    value::{Row, Val},
};

const THREADS: usize = 4;
/// Maximum number of queries answered from one snapshot of the database. Each commit of the writer makes a reader drop
/// its cached pages; within one snapshot they are kept, so queries that wait together share them.
const BATCH_MAX: usize = 8;

struct ReadRequest {
    sql: String,
    params: Vec<Val>,
    answer: ReplySender<Vec<Row>>,
}

pub(super) struct Readers {
    questions: mpsc::Sender<ReadRequest>,
}

impl Readers {
    pub(super) fn start(
        path: &Path,
        clock: &Clock,
        ids: &Ids,
        counters: &Arc<Counters>,
    ) -> Result<Self, DbError> {
        let (questions, queue) = mpsc::channel::<ReadRequest>();
        let queue = Arc::new(Mutex::new(queue));
        for number in 0..THREADS {
            let conn = Conn::reader(path, clock.clone(), ids.clone())?;
            let (queue, counters) = (Arc::clone(&queue), Arc::clone(counters));
            thread::Builder::new()
                .name(format!("sqlite-read-{number}"))
                .spawn(move || serve(&conn, &queue, &counters))
                .map_err(|error| DbError::open("the database: cannot start a reader thread", error))?;
        }
        Ok(Self { questions })
    }

    pub(super) async fn read(&self, sql: String, params: Vec<Val>) -> Result<Vec<Row>, DbError> {
        let (answer, answered) = oneshot::channel();
        self.questions.send(ReadRequest { sql, params, answer }).map_err(|_| DbError::closed("read"))?;
        answered.await.map_err(|_| DbError::closed("read"))?
    }
}

fn serve(conn: &Conn, queue: &Mutex<mpsc::Receiver<ReadRequest>>, counters: &Counters) {
    let mut questions = Vec::with_capacity(BATCH_MAX);
    loop {
        {
            // The lock is held while waiting: one idle thread waits for a query, the others for the lock.
            let queue = queue.lock();
            let Ok(first) = queue.recv() else { return };
            questions.push(first);
            questions.extend(queue.try_iter().take(BATCH_MAX - 1));
        }
        let began = Instant::now();
        // The snapshot starts after the last query arrived, so each caller sees all earlier commits.
        let has_view = questions.len() > 1 && conn.begin_view().is_ok();
        for question in questions.drain(..) {
            let rows = conn.read(&question.sql, &question.params);
            counters.count_statements(1, rows.as_ref().map_or(0, Vec::len));
            // The receiver is gone if the caller was dropped; a read has no effects.
            let _ = question.answer.send(rows);
        }
        if has_view {
            conn.end_view();
        }
        counters.count_busy(began.elapsed());
    }
}
