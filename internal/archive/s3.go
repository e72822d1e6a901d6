//go:build !nos3

// The tag nos3 leaves out S3: the packages of a release have the program without it, and dlqd-s3 is the one with it.

package archive

import _ "gocloud.dev/blob/s3blob" // s3://
