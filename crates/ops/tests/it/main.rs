//! Tests of the operations through their public face.

mod attention;
mod common;
