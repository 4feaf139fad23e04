//! Tests come with the complete module.
