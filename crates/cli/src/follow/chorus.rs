//! The output of all jobs of a run at once, as it grows.

use std::{future::poll_fn, task::Poll, time::Duration};

use tokio::time::{Instant, timeout, timeout_at};
use uuid::Uuid;
use windlass_api::runs::Run;
use windlass_model::time::Timestamp;

use super::{
    events::Events,
    progress::standings,
    tail::{Heard, Part, Piece, Tail},
    tree::Tree,
    voices::{Place, Voices},
};
use crate::{context::Context, problem::Problem};

/// When a job has ended, the rest of its output comes by then.
const REST_WITHIN: Duration = Duration::from_secs(15);
/// Without a stream, the page after the end is the last; one may have been asked for before.
const EMPTY_PAGES: u32 = 2;

/// Why listening stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sung {
    /// It is time.
    Due,
    /// One of them has said all.
    Over,
    /// Nobody reads what we write.
    Unread,
}

/// How output is written.
pub(crate) enum Manner {
    Text(Voices),
    /// As events for machines.
    Events,
}

pub(crate) struct Chorus<'a> {
    manner: Manner,
    tails: Vec<(Place, Tail<'a>)>,
    /// Whose turn it is, so that one who shouts does not drown the others.
    turn: usize,
}

impl<'a> Chorus<'a> {
    pub(crate) fn new(manner: Manner) -> Self {
        Self { manner, tails: Vec::new(), turn: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tails.is_empty()
    }

    /// Ends with half a line.
    pub(super) fn mid_line(&self) -> bool {
        match &self.manner {
            Manner::Text(voices) => voices.mid_line,
            Manner::Events => false,
        }
    }

    /// Which submission of a job is heard.
    pub(crate) fn submission_at(&self, place: Place) -> Option<Uuid> {
        self.tails.iter().find(|(other, _)| *other == place).map(|(_, tail)| tail.submission())
    }

    /// What stands in front of the lines of a job, instead of its place.
    pub(crate) fn set_label(&mut self, place: Place, label: String) {
        if let Manner::Text(voices) = &mut self.manner {
            voices.labels.insert(place, label);
        }
    }

    pub(crate) fn add(&mut self, place: Place, tail: Tail<'a>) {
        self.tails.push((place, tail));
        if let Manner::Text(voices) = &mut self.manner {
            voices.several |= self.tails.len() > 1;
        }
    }

    /// Listens to the newest submission of each job, after all of the one before. False when nobody reads it.
    pub(super) async fn turn_to(
        &mut self,
        cx: &'a Context,
        name: &str,
        run: &Run,
        since: Option<Timestamp>,
        tree: &mut Tree,
    ) -> Result<bool, Problem> {
        let all = standings(run);
        if let Manner::Text(voices) = &mut self.manner {
            voices.several |= all.len() > 1;
        }
        for job in all {
            let place = (job.replica, job.job);
            match self.submission_at(place) {
                Some(known) if known == job.submission => continue,
                Some(_) if !self.leave(place, tree).await? => return Ok(false),
                Some(_) | None => {}
            }
            self.add(place, Tail::new(cx, Part { since, ..Part::whole(name, job.submission) }));
        }
        Ok(true)
    }

    /// Writes what comes until then.
    pub(crate) async fn sing(&mut self, until: Instant, tree: &mut Tree) -> Result<Sung, Problem> {
        loop {
            let Ok((index, heard)) = timeout_at(until, self.hear()).await else { return Ok(Sung::Due) };
            match heard? {
                Heard::Pieces(pieces) => {
                    if !self.write(index, &pieces, tree) {
                        return Ok(Sung::Unread);
                    }
                }
                Heard::Quiet => {}
                Heard::Over => return Ok(if self.rest(index, tree) { Sung::Over } else { Sung::Unread }),
            }
        }
    }

    /// All jobs have ended: writes the rest. False when nobody reads it.
    pub(crate) async fn finish(&mut self, tree: &mut Tree) -> Result<bool, Problem> {
        for index in 0..self.tails.len() {
            if !self.finish_one(index, tree).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes the rest of what is heard of a job, and listens no longer. False when nobody reads it.
    pub(crate) async fn leave(&mut self, place: Place, tree: &mut Tree) -> Result<bool, Problem> {
        let Some(index) = self.tails.iter().position(|(other, _)| *other == place) else { return Ok(true) };
        let is_read = self.finish_one(index, tree).await?;
        self.tails.remove(index);
        Ok(is_read)
    }

    async fn finish_one(&mut self, index: usize, tree: &mut Tree) -> Result<bool, Problem> {
        let mut empty = 0;
        while !self.tails[index].1.is_over() && empty < EMPTY_PAGES {
            let tail = &mut self.tails[index].1;
            // A log that never ends, because its host is gone, has been read as far as it was kept.
            let Ok(heard) = timeout(REST_WITHIN, poll_fn(|cx| tail.poll_hear(cx))).await else { break };
            match heard? {
                Heard::Pieces(pieces) => {
                    empty = 0;
                    if !self.write(index, &pieces, tree) {
                        return Ok(false);
                    }
                }
                Heard::Quiet => empty += 1,
                Heard::Over => break,
            }
        }
        Ok(self.rest(index, tree))
    }

    /// The next of them that has something to say. Never done when none has. May be given up at any time.
    async fn hear(&mut self) -> (usize, Result<Heard, Problem>) {
        poll_fn(|cx| {
            let count = self.tails.len();
            for step in 0..count {
                let index = (self.turn + step) % count;
                if let Poll::Ready(heard) = self.tails[index].1.poll_hear(cx) {
                    self.turn = index + 1;
                    return Poll::Ready((index, heard));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// False when nobody reads it.
    fn write(&mut self, index: usize, pieces: &[Piece], tree: &mut Tree) -> bool {
        let (place, tail) = &self.tails[index];
        match &mut self.manner {
            Manner::Events => {
                pieces.iter().for_each(|piece| Events::log(*place, tail.submission(), piece));
                true
            }
            Manner::Text(voices) => {
                tree.erase();
                pieces.iter().all(|piece| voices.write(*place, piece.at, &piece.bytes))
            }
        }
    }

    fn rest(&mut self, index: usize, tree: &mut Tree) -> bool {
        match &mut self.manner {
            Manner::Events => true,
            Manner::Text(voices) => {
                tree.erase();
                voices.end_of(self.tails[index].0)
            }
        }
    }
}
