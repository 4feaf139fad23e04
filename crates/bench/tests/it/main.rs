//! Integration tests of measurements.

mod collectives;
