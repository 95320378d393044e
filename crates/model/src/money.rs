//! Money as whole millionths of a dollar: prices compare, sort and add up without rounding errors.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Dollars per hour, in millionths. In the API a plain number of dollars.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Price(pub u64);

impl Price {
    pub const ZERO: Self = Self(0);
    /// Price that the backend of an offer does not know: a billion dollars, which sorts last and exceeds every limit.
    pub const UNKNOWN: Self = Self(1_000_000_000_000_000);

    pub const fn is_known(self) -> bool {
        self.0 < Self::UNKNOWN.0
    }

    /// Converts dollars. Negative values and NaN become zero; too large values become the maximum.
    pub fn from_dollars(amount: f64) -> Self {
        Self((amount * 1e6).round() as u64)
    }

    pub fn as_dollars(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// Returns dollars; `None` for the unknown price.
    pub fn known_dollars(self) -> Option<f64> {
        self.is_known().then(|| self.as_dollars())
    }
}

/// Prints `$1.2/h`.
impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.is_known() {
            return f.write_str("unknown price");
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_price_sorts_last_survives_storage_and_is_not_an_amount() {
        let dearest = Price::from_dollars(100_000.0);
        assert!(Price::UNKNOWN > dearest && dearest.is_known() && !Price::UNKNOWN.is_known());
        let stored = serde_json::to_string(&Price::UNKNOWN).unwrap();
        assert_eq!(serde_json::from_str::<Price>(&stored).unwrap(), Price::UNKNOWN);
        assert_eq!((Price::UNKNOWN.known_dollars(), dearest.known_dollars()), (None, Some(100_000.0)));
        assert_eq!([Price::UNKNOWN.to_string(), Price(1_200_000).to_string()], ["unknown price", "$1.2/h"]);
    }
}
