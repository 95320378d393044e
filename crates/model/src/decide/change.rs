//! A change of status together with its reason.

use crate::{
    event::{Actor, EventCause},
    state_machine::StrEnum,
};

/// An event for the state machine, a reason for programs and a message for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change<E> {
    pub event: E,
    pub reason: &'static str,
    pub message: String,
}

impl<E: StrEnum> Change<E> {
    /// Creates a change whose reason is the event itself.
    pub fn from_event(event: E, message: impl Into<String>) -> Self {
        Self { event, reason: event.as_str(), message: message.into() }
    }
}

impl<E> Change<E> {
    pub fn new(event: E, reason: &'static str, message: impl Into<String>) -> Self {
        Self { event, reason, message: message.into() }
    }

    pub fn cause(&self, actor: Actor) -> EventCause {
        EventCause { actor, reason: self.reason.to_owned(), message: self.message.clone() }
    }
}
