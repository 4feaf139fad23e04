//! Tests of the driver half through its public face.

mod kernels;
