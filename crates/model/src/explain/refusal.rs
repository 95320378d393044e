//! Locations that refused a job, and one line about them.

use std::fmt::{self, Display};

use serde::Serialize;

use super::Shortfall;

/// One location that refused a job, or several equal ones, with every reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Refusal {
    /// Name of an instance, or the offer: `aws us-east-1 p4d.24xlarge`.
    pub place: String,
    /// Number of equal locations.
    pub count: u32,
    pub shortfalls: Vec<Shortfall>,
}

impl Refusal {
    /// Returns whether waiting alone may resolve it.
    pub fn is_temporary(&self) -> bool {
        self.shortfalls.iter().all(Shortfall::is_temporary)
    }

    /// Returns whether only a quota or a budget prevents the start.
    pub fn is_over_bound(&self) -> bool {
        self.shortfalls
            .iter()
            .all(|short| matches!(short, Shortfall::OverQuota(_) | Shortfall::OverBudget(_)))
    }
}

/// Prints `gpu-0 and 3 more: needs at least 8 CPUs, has 2 (lower cpu to 2); …`.
impl Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place)?;
        if self.count > 1 {
            write!(f, " and {} more", self.count - 1)?;
        }
        for (index, shortfall) in self.shortfalls.iter().enumerate() {
            let sign = if index == 0 { ": " } else { "; " };
            write!(f, "{sign}{shortfall} ({})", shortfall.cure())?;
        }
        Ok(())
    }
}

/// Returns one line for a status column: the nearest miss, which is first, and the number of others.
pub fn refusal_summary(refusals: &[Refusal]) -> Option<String> {
    let nearest = refusals.first()?;
    let others: u32 = refusals.iter().skip(1).map(|refusal| refusal.count).sum();
    Some(match others {
        0 => nearest.to_string(),
        1 => format!("{nearest}; and 1 other place does not fit"),
        _ => format!("{nearest}; and {others} other places do not fit"),
    })
}
