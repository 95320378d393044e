//! Money as whole millionths of a dollar: prices compare, sort and add up without rounding errors.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Dollars per hour, in millionths. In the API a plain number of dollars.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Price(pub u64);

impl Price {
    pub const ZERO: Self = Self(0);

    /// Converts dollars. Negative values and NaN become zero; too large values become the maximum.
    pub fn from_dollars(amount: f64) -> Self {
        Self((amount * 1e6).round() as u64)
    }

    pub fn as_dollars(self) -> f64 {
        self.0 as f64 / 1e6
    }
}

/// Prints `$1.2/h`.
impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "${}/h", self.as_dollars())
    }
}

impl Serialize for Price {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.as_dollars())
    }
}

impl<'de> Deserialize<'de> for Price {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        f64::deserialize(deserializer).map(Self::from_dollars)
    }
}
