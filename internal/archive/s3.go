//go:build !nos3

// The build tag nos3 excludes S3. In a release, the program dlqd is built with this tag, and dlqd-full without it.

package archive

import _ "gocloud.dev/blob/s3blob" // s3://
